"""Pods, containers and resources in NRI's messages, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from cri_server.store.model import Container, Sandbox
from pyrunc.errors import InvalidArgument

STATES = {
    cri.CONTAINER_CREATED: api.CONTAINER_CREATED,
    cri.CONTAINER_RUNNING: api.CONTAINER_RUNNING,
    cri.CONTAINER_EXITED: api.CONTAINER_STOPPED,
    cri.CONTAINER_UNKNOWN: api.CONTAINER_UNKNOWN,
}
HOOKS = {
    "prestart": "prestart",
    "create_runtime": "createRuntime",
    "create_container": "createContainer",
    "start_container": "startContainer",
    "poststart": "poststart",
    "poststop": "poststop",
}
# Fields of NRI's messages and the keys of an OCI configuration that mean the same.
MEMORY = {
    "limit": "limit",
    "reservation": "reservation",
    "swap": "swap",
    "kernel": "kernel",
    "kernel_tcp": "kernelTCP",
    "swappiness": "swappiness",
    "disable_oom_killer": "disableOOMKiller",
    "use_hierarchy": "useHierarchy",
}
CPU = {
    "shares": "shares",
    "quota": "quota",
    "period": "period",
    "realtime_runtime": "realtimeRuntime",
    "realtime_period": "realtimePeriod",
}
CPU_SETS = {"cpus": "cpus", "mems": "mems"}


def pod(sandbox: Sandbox) -> api.PodSandbox:
    """A pod as plugins see it. One that was stopped has no network namespace: the path to it may
    lead to another by now."""
    config = sandbox.config
    has_network = sandbox.netns_path and sandbox.phase != "stopped"
    network = [api.LinuxNamespace(type="network", path=sandbox.netns_path)] if has_network else []
    return api.PodSandbox(
        id=sandbox.id,
        name=config.metadata.name,
        uid=config.metadata.uid,
        namespace=config.metadata.namespace,
        labels=dict(config.labels),
        annotations=dict(config.annotations),
        runtime_handler=sandbox.runtime_handler,
        linux=api.LinuxPodSandbox(
            pod_overhead=from_cri(config.linux.overhead),
            pod_resources=from_cri(config.linux.resources),
            cgroup_parent=config.linux.cgroup_parent,
            cgroups_path=sandbox.cgroups_path,
            namespaces=network,
        ),
        pid=sandbox.pause.pid if sandbox.pause is not None else 0,
        ips=sandbox.ips,
    )


def container(of: Container, spec: Mapping[str, Any], *, made: bool = True) -> api.Container:
    """A container as plugins see it, with its OCI configuration; `made` is false while it is being
    created."""
    config, process, linux = of.config, spec.get("process", {}), spec.get("linux", {})
    ended = of.exit
    return api.Container(
        id=of.id,
        pod_sandbox_id=of.sandbox_id,
        name=config.metadata.name,
        state=STATES[of.state] if made else api.CONTAINER_UNKNOWN,  # type: ignore[index]
        labels=dict(config.labels),
        annotations={**spec.get("annotations", {}), **config.annotations},
        args=process.get("args", ()),
        env=process.get("env", ()),
        mounts=[_mount(m) for m in spec.get("mounts", ())],
        hooks=_hooks(spec.get("hooks", {})),
        linux=_linux(of, process, linux),
        pid=of.process.pid if of.process is not None and ended is None else 0,
        rlimits=[
            api.POSIXRlimit(type=r["type"], hard=r["hard"], soft=r["soft"])
            for r in process.get("rlimits", ())
        ],
        created_at=of.created_at_ns,
        started_at=of.started_at_ns,
        finished_at=ended.finished_at_ns if ended else 0,
        exit_code=ended.exit_code if ended else 0,
        status_reason=ended.cri_reason if ended else "",
        status_message=ended.message if ended else "",
        CDI_devices=[api.CDIDevice(name=device.name) for device in config.CDI_devices],
        user=api.User(uid=of.user.uid, gid=of.user.gid, additional_gids=of.user.groups),
        image=api.Image(
            name=of.image_name,
            digest=of.image_ref.rpartition("@")[2] if "@" in of.image_ref else "",
            config_digest=of.image_id,
        ),
    )


def _linux(
    of: Container, process: Mapping[str, Any], linux: Mapping[str, Any]
) -> api.LinuxContainer:
    result = api.LinuxContainer(
        namespaces=[
            api.LinuxNamespace(type=n["type"], path=n.get("path", ""))
            for n in linux.get("namespaces", ())
        ],
        devices=[_device(d) for d in linux.get("devices", ())],
        resources=from_oci(linux.get("resources", {})),
        cgroups_path=of.cgroups_path,
        sysctl=linux.get("sysctl", {}),
        net_devices={
            name: api.LinuxNetDevice(name=device.get("name", ""))
            for name, device in linux.get("netDevices", {}).items()
        },
    )
    if process.get("oomScoreAdj") is not None:
        result.oom_score_adj.value = process["oomScoreAdj"]
    if "ioPriority" in process:
        given = process["ioPriority"]
        setattr(result.io_priority, "class", api.IOPrioClass.Value(given["class"]))
        result.io_priority.priority = given.get("priority", 0)
    profile = of.config.linux.security_context.seccomp
    if of.config.linux.security_context.HasField("seccomp"):
        result.seccomp_profile.profile_type = profile.profile_type  # type: ignore[assignment]
        result.seccomp_profile.localhost_ref = profile.localhost_ref
    if "scheduler" in process:
        given = process["scheduler"]
        result.scheduler.policy = api.LinuxSchedulerPolicy.Value(given["policy"])  # type: ignore[assignment]
        for name in ("nice", "priority", "runtime", "deadline", "period"):
            setattr(result.scheduler, name, given.get(name, 0))
    if "intelRdt" in linux:
        result.rdt.clos_id.value = linux["intelRdt"].get("closID", "")
        result.rdt.schemata.value.extend(linux["intelRdt"].get("schemata", ()))
    return result


def _mount(given: Mapping[str, Any]) -> api.Mount:
    return api.Mount(
        destination=given["destination"],
        type=given.get("type", ""),
        source=given.get("source", ""),
        options=given.get("options", ()),
    )


def _hooks(given: Mapping[str, Any]) -> api.Hooks:
    result = api.Hooks()
    for name, key in HOOKS.items():
        for entry in given.get(key, ()):
            hook = getattr(result, name).add(
                path=entry["path"], args=entry.get("args", ()), env=entry.get("env") or ()
            )
            if entry.get("timeout") is not None:
                hook.timeout.value = entry["timeout"]
    return result


def _device(given: Mapping[str, Any]) -> api.LinuxDevice:
    result = api.LinuxDevice(
        path=given["path"],
        type=given["type"],
        major=given.get("major", 0),
        minor=given.get("minor", 0),
    )
    for name, key in (("file_mode", "fileMode"), ("uid", "uid"), ("gid", "gid")):
        if given.get(key) is not None:
            getattr(result, name).value = given[key]
    return result


def from_oci(given: Mapping[str, Any]) -> api.LinuxResources:
    """`linux.resources` of an OCI configuration."""
    result = api.LinuxResources(
        memory=api.LinuxMemory(),
        cpu=api.LinuxCPU(),
        hugepage_limits=[
            api.HugepageLimit(page_size=h["pageSize"], limit=h["limit"])
            for h in given.get("hugepageLimits", ())
        ],
        unified=given.get("unified", {}),
    )
    for table, message, found in (
        (MEMORY, result.memory, given.get("memory", {})),
        (CPU, result.cpu, given.get("cpu", {})),
    ):
        for name, key in table.items():
            if found.get(key) is not None:
                getattr(message, name).value = found[key]
    for name, key in CPU_SETS.items():
        setattr(result.cpu, name, given.get("cpu", {}).get(key, ""))
    for rule in given.get("devices", ()):
        added = result.devices.add(
            allow=rule["allow"], type=rule.get("type", ""), access=rule.get("access", "")
        )
        for name in ("major", "minor"):
            if rule.get(name) is not None:
                getattr(added, name).value = rule[name]
    if given.get("pids", {}).get("limit") is not None:
        result.pids.limit = given["pids"]["limit"]
    return result


def from_cri(given: cri.LinuxContainerResources) -> api.LinuxResources:
    """Those of a CRI request; what is zero was not asked for."""
    result = api.LinuxResources(
        memory=api.LinuxMemory(),
        cpu=api.LinuxCPU(cpus=given.cpuset_cpus, mems=given.cpuset_mems),
        hugepage_limits=[
            api.HugepageLimit(page_size=h.page_size, limit=h.limit) for h in given.hugepage_limits
        ],
        unified=dict(given.unified),
    )
    for message, value in (
        (result.memory.limit, given.memory_limit_in_bytes),
        (result.memory.swap, given.memory_swap_limit_in_bytes),
        (result.cpu.shares, given.cpu_shares),
        (result.cpu.quota, given.cpu_quota),
        (result.cpu.period, given.cpu_period),
    ):
        if value:
            message.value = value
    return result


def to_cri(given: api.LinuxResources) -> cri.LinuxContainerResources:
    """What CRI has words for; class names and limits of cgroup v1 have none.

    Raises InvalidArgument for a number that CRI cannot hold: some are unsigned only in NRI.
    """
    try:
        return _to_cri(given)
    except ValueError as error:
        raise InvalidArgument(f"NRI: resources: {error}") from None


def _to_cri(given: api.LinuxResources) -> cri.LinuxContainerResources:
    return cri.LinuxContainerResources(
        cpu_period=given.cpu.period.value,
        cpu_quota=given.cpu.quota.value,
        cpu_shares=given.cpu.shares.value,
        memory_limit_in_bytes=given.memory.limit.value,
        memory_swap_limit_in_bytes=given.memory.swap.value,
        cpuset_cpus=given.cpu.cpus,
        cpuset_mems=given.cpu.mems,
        hugepage_limits=[
            cri.HugepageLimit(page_size=h.page_size, limit=h.limit) for h in given.hugepage_limits
        ],
        unified=dict(given.unified),
    )
