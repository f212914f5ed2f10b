"""Converts pods, containers and resources to NRI's messages and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class ResourceField(NamedTuple):
    """A field of NRI's resources: its key in an OCI configuration, and its `api.Field` number.
    `Owners` stores under this number which plugin has set the field."""

    key: str
    number: api.Field


MEMORY = {
    "limit": ResourceField("limit", api.MemLimit),
    "reservation": ResourceField("reservation", api.MemReservation),
    "swap": ResourceField("swap", api.MemSwapLimit),
    "kernel": ResourceField("kernel", api.MemKernelLimit),
    "kernel_tcp": ResourceField("kernelTCP", api.MemTCPLimit),
    "swappiness": ResourceField("swappiness", api.MemSwappiness),
    "disable_oom_killer": ResourceField("disableOOMKiller", api.MemDisableOomKiller),
    "use_hierarchy": ResourceField("useHierarchy", api.MemUseHierarchy),
}
CPU = {
    "shares": ResourceField("shares", api.CPUShares),
    "quota": ResourceField("quota", api.CPUQuota),
    "period": ResourceField("period", api.CPUPeriod),
    "realtime_runtime": ResourceField("realtimeRuntime", api.CPURealtimeRuntime),
    "realtime_period": ResourceField("realtimePeriod", api.CPURealtimePeriod),
}
CPU_SETS = {"cpus": api.CPUSetCPUs, "mems": api.CPUSetMems}
DEVICE_OWNER = {"file_mode": "fileMode", "uid": "uid", "gid": "gid"}


def pod(sandbox: Sandbox) -> api.PodSandbox:
    """Convert a pod to NRI's message. For a stopped pod the path of the network namespace is left
    out, because another pod may have that path by then."""
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


def container(source: Container, spec: Mapping[str, Any], *, created: bool = True) -> api.Container:
    """Convert the container `source` and its OCI configuration. `created`: False while the
    container is being created."""
    config, process, linux = source.config, spec.get("process", {}), spec.get("linux", {})
    ended = source.exit
    return api.Container(
        id=source.id,
        pod_sandbox_id=source.sandbox_id,
        name=config.metadata.name,
        state=STATES[source.state] if created else api.CONTAINER_UNKNOWN,  # type: ignore[index]
        labels=dict(config.labels),
        annotations={**spec.get("annotations", {}), **config.annotations},
        args=process.get("args", ()),
        env=[_utf_8(entry) for entry in process.get("env", ())],
        mounts=[_mount(m) for m in spec.get("mounts", ())],
        hooks=_hooks(spec.get("hooks", {})),
        linux=_linux(source, process, linux),
        pid=source.process.pid if source.process is not None and ended is None else 0,
        rlimits=[
            api.POSIXRlimit(type=r["type"], hard=r["hard"], soft=r["soft"])
            for r in process.get("rlimits", ())
        ],
        created_at=source.created_at_ns,
        started_at=source.started_at_ns,
        finished_at=ended.finished_at_ns if ended else 0,
        exit_code=ended.exit_code if ended else 0,
        status_reason=ended.cri_reason if ended else "",
        status_message=ended.message if ended else "",
        CDI_devices=[api.CDIDevice(name=device.name) for device in config.CDI_devices],
        user=api.User(uid=source.user.uid, gid=source.user.gid, additional_gids=source.user.groups),
        image=api.Image(
            name=source.image_name,
            digest=source.image_ref.rpartition("@")[2] if "@" in source.image_ref else "",
            config_digest=source.image_id,
        ),
    )


def _utf_8(text: str) -> str:
    """Return `text` with U+FFFD in place of each surrogate escape (a byte that is not UTF-8),
    because protobuf refuses these. (HOME may come from the image's /etc/passwd.)"""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _linux(
    source: Container, process: Mapping[str, Any], linux: Mapping[str, Any]
) -> api.LinuxContainer:
    result = api.LinuxContainer(
        namespaces=[
            api.LinuxNamespace(type=n["type"], path=n.get("path", ""))
            for n in linux.get("namespaces", ())
        ],
        devices=[_device(d) for d in linux.get("devices", ())],
        resources=from_oci(linux.get("resources", {})),
        cgroups_path=source.cgroups_path,
        sysctl=linux.get("sysctl", {}),
        net_devices={
            name: api.LinuxNetDevice(name=device.get("name", ""))
            for name, device in linux.get("netDevices", {}).items()
        },
    )
    if process.get("oomScoreAdj") is not None:
        result.oom_score_adj.value = process["oomScoreAdj"]
    if "ioPriority" in process:
        scheduling = process["ioPriority"]
        setattr(result.io_priority, "class", api.IOPrioClass.Value(scheduling["class"]))
        result.io_priority.priority = scheduling.get("priority", 0)
    # A plugin gets CRI's form with the profile's name, and not the compiled filter.
    profile = source.config.linux.security_context.seccomp
    if source.config.linux.security_context.HasField("seccomp"):
        result.seccomp_profile.profile_type = profile.profile_type  # type: ignore[assignment]
        result.seccomp_profile.localhost_ref = profile.localhost_ref
    if "scheduler" in process:
        scheduling = process["scheduler"]
        result.scheduler.policy = api.LinuxSchedulerPolicy.Value(  # type: ignore[assignment]
            scheduling["policy"]
        )
        for name in ("nice", "priority", "runtime", "deadline", "period"):
            setattr(result.scheduler, name, scheduling.get(name, 0))
    if "intelRdt" in linux:
        result.rdt.clos_id.value = linux["intelRdt"].get("closID", "")
        result.rdt.schemata.value.extend(linux["intelRdt"].get("schemata", ()))
    return result


def _mount(mount: Mapping[str, Any]) -> api.Mount:
    return api.Mount(
        destination=mount["destination"],
        type=mount.get("type", ""),
        source=mount.get("source", ""),
        options=mount.get("options", ()),
    )


def _hooks(hooks: Mapping[str, Any]) -> api.Hooks:
    result = api.Hooks()
    for name, key in HOOKS.items():
        for entry in hooks.get(key, ()):
            hook = getattr(result, name).add(
                path=entry["path"], args=entry.get("args", ()), env=entry.get("env") or ()
            )
            if entry.get("timeout") is not None:
                hook.timeout.value = entry["timeout"]
    return result


def _device(device: Mapping[str, Any]) -> api.LinuxDevice:
    result = api.LinuxDevice(
        path=device["path"],
        type=device["type"],
        major=device.get("major", 0),
        minor=device.get("minor", 0),
    )
    for name, key in DEVICE_OWNER.items():
        if device.get(key) is not None:
            getattr(result, name).value = device[key]
    return result


def from_oci(resources: Mapping[str, Any]) -> api.LinuxResources:
    """Convert `linux.resources` of an OCI configuration to NRI's resources."""
    result = api.LinuxResources(
        memory=api.LinuxMemory(),
        cpu=api.LinuxCPU(),
        hugepage_limits=[
            api.HugepageLimit(page_size=h["pageSize"], limit=h["limit"])
            for h in resources.get("hugepageLimits", ())
        ],
        unified=resources.get("unified", {}),
    )
    for table, message, values in (
        (MEMORY, result.memory, resources.get("memory", {})),
        (CPU, result.cpu, resources.get("cpu", {})),
    ):
        for name, field in table.items():
            if values.get(field.key) is not None:
                getattr(message, name).value = values[field.key]
    for name in CPU_SETS:
        setattr(result.cpu, name, resources.get("cpu", {}).get(name, ""))
    for rule in resources.get("devices", ()):
        added = result.devices.add(
            allow=rule["allow"], type=rule.get("type", ""), access=rule.get("access", "")
        )
        for name in ("major", "minor"):
            if rule.get(name) is not None:
                getattr(added, name).value = rule[name]
    if resources.get("pids", {}).get("limit") is not None:
        result.pids.limit = resources["pids"]["limit"]
    return result


def from_cri(resources: cri.LinuxContainerResources) -> api.LinuxResources:
    """Convert CRI's resources to NRI's; zero means unset."""
    result = api.LinuxResources(
        memory=api.LinuxMemory(),
        cpu=api.LinuxCPU(cpus=resources.cpuset_cpus, mems=resources.cpuset_mems),
        hugepage_limits=[
            api.HugepageLimit(page_size=h.page_size, limit=h.limit)
            for h in resources.hugepage_limits
        ],
        unified=dict(resources.unified),
    )
    for message, value in (
        (result.memory.limit, resources.memory_limit_in_bytes),
        (result.memory.swap, resources.memory_swap_limit_in_bytes),
        (result.cpu.shares, resources.cpu_shares),
        (result.cpu.quota, resources.cpu_quota),
        (result.cpu.period, resources.cpu_period),
    ):
        if value:
            message.value = value
    return result


def to_cri(resources: api.LinuxResources) -> cri.LinuxContainerResources:
    """Convert NRI's resources to CRI's. Drops fields that CRI lacks: the classes of block I/O and
    RDT, and limits that only cgroup v1 has.

    Raises InvalidArgument for a number outside of CRI's range: some fields are unsigned in NRI and
    signed in CRI.
    """
    try:
        return cri.LinuxContainerResources(
            cpu_period=resources.cpu.period.value,
            cpu_quota=resources.cpu.quota.value,
            cpu_shares=resources.cpu.shares.value,
            memory_limit_in_bytes=resources.memory.limit.value,
            memory_swap_limit_in_bytes=resources.memory.swap.value,
            cpuset_cpus=resources.cpu.cpus,
            cpuset_mems=resources.cpu.mems,
            hugepage_limits=[
                cri.HugepageLimit(page_size=h.page_size, limit=h.limit)
                for h in resources.hugepage_limits
            ],
            unified=dict(resources.unified),
        )
    except ValueError as error:
        raise InvalidArgument(f"NRI: resources: {error}") from None
