"""A merged adjustment applied to a container's OCI configuration, before anything is compiled from
it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.nri.convert import CPU, CPU_SETS, HOOKS, MEMORY
from cri_server.nri.merge import removal
from pyrunc.errors import InvalidArgument

Spec = dict[str, Any]
SCHEDULER_NUMBERS = ("nice", "priority", "runtime", "deadline", "period")


def apply(
    spec: Spec,
    given: api.ContainerAdjustment,
    clamp_oom_score_adj: Callable[[int], int],
    block_io: Callable[[str], Spec],
    rdt: Callable[[str], Spec],
) -> None:
    """Change `spec`. CDI devices are not here: their files are looked up first
    (`cri_server.spec.cdi`).

    `block_io` and `rdt` know the OCI object of a class. Raises InvalidArgument for what no
    configuration can say.
    """
    process, linux, asked = spec["process"], spec["linux"], given.linux
    _pairs(spec, "annotations", given.annotations)
    _environment(process, given.env)
    if given.args:
        process["args"] = list(given.args)
    _hooks(spec, given.hooks)
    for device in asked.devices:
        _device(linux, device)
    if asked.cgroups_path:
        linux["cgroupsPath"] = asked.cgroups_path
    if asked.HasField("oom_score_adj"):
        process["oomScoreAdj"] = clamp_oom_score_adj(asked.oom_score_adj.value)
    _io_priority(process, asked)
    if asked.HasField("scheduler"):
        _scheduler(process, asked.scheduler)
    if asked.HasField("seccomp_policy"):
        linux["seccomp"] = _seccomp(asked.seccomp_policy)
    for namespace in asked.namespaces:
        _namespace(linux, namespace)
    _pairs(linux, "sysctl", asked.sysctl)
    _pairs(
        linux,
        "netDevices",
        asked.net_devices,
        lambda device: {"name": device.name} if device.name else {},
    )
    if asked.HasField("memory_policy"):
        linux["memoryPolicy"] = _memory_policy(asked.memory_policy)
    _resources(linux, asked.resources)
    if asked.resources.HasField("blockio_class"):
        linux["resources"].pop("blockIO", None)
        if asked.resources.blockio_class.value:
            linux["resources"]["blockIO"] = block_io(asked.resources.blockio_class.value)
    _rdt(linux, asked, rdt)
    _mounts(spec, given.mounts)
    for limit in given.rlimits:
        kept = [entry for entry in process.get("rlimits", ()) if entry["type"] != limit.type]
        process["rlimits"] = [*kept, {"type": limit.type, "hard": limit.hard, "soft": limit.soft}]


def _pairs(
    owner: Spec,
    key: str,
    given: Mapping[str, Any],
    value: Callable[[Any], Any] = lambda given: given,
) -> None:
    if not given:
        return
    entries = owner.setdefault(key, {})
    for name in given:
        removed = removal(name)
        if removed is not None:
            entries.pop(removed, None)
    for name, wanted in given.items():
        if removal(name) is None:
            entries[name] = value(wanted)


def _environment(process: Spec, given: Iterable[api.KeyValue]) -> None:
    """A variable keeps its place, a new one goes to the end."""
    lines = {line.partition("=")[0]: line for line in process["env"]}
    for entry in given:
        removed = removal(entry.key)
        if removed is not None:
            lines.pop(removed, None)
        elif not entry.key or "=" in entry.key or "\0" in entry.key + entry.value:
            raise InvalidArgument(
                f"NRI: {entry.key[:80]!r} is not the name of an environment variable"
            )
        else:
            lines[entry.key] = f"{entry.key}={entry.value}"
    process["env"] = list(lines.values())


def _hooks(spec: Spec, given: api.Hooks) -> None:
    for name, key in HOOKS.items():
        for hook in getattr(given, name):
            if not hook.path.startswith("/"):
                raise InvalidArgument(f"NRI: hook {hook.path[:200]!r} is not an absolute path")
            entry: Spec = {"path": hook.path, "args": list(hook.args), "env": list(hook.env)}
            if hook.HasField("timeout"):
                entry["timeout"] = hook.timeout.value
            spec.setdefault("hooks", {}).setdefault(key, []).append(entry)


def _device(linux: Spec, given: api.LinuxDevice) -> None:
    removed = removal(given.path)
    path = given.path if removed is None else removed
    kept = [device for device in linux.get("devices", ()) if device["path"] != path]
    if removed is None:
        device: Spec = {
            "path": path,
            "type": given.type,
            "major": given.major,
            "minor": given.minor,
        }
        for name, key in (("file_mode", "fileMode"), ("uid", "uid"), ("gid", "gid")):
            if given.HasField(name):  # type: ignore[arg-type]
                device[key] = getattr(given, name).value
        kept.append(device)
        rule = {"allow": True, "type": given.type, "major": given.major, "minor": given.minor}
        linux["resources"].setdefault("devices", []).append({**rule, "access": _access(given)})
    linux["devices"] = kept


def _access(given: api.LinuxDevice) -> str:
    """What its file's mode permits to anybody, and mknod for block devices, as the Go module has
    it."""
    mode = given.file_mode.value if given.HasField("file_mode") else 0o666
    read, write = ("r" if mode & 0o444 else ""), ("w" if mode & 0o222 else "")
    return read + write + ("m" if given.type == "b" else "")


def _io_priority(process: Spec, asked: api.LinuxContainerAdjustment) -> None:
    if not asked.HasField("io_priority"):
        return
    kind = getattr(asked.io_priority, "class")
    process.pop("ioPriority", None)
    if kind != api.IOPRIO_CLASS_NONE:
        process["ioPriority"] = {
            "class": api.IOPrioClass.Name(kind),
            "priority": asked.io_priority.priority,
        }


def _scheduler(process: Spec, given: api.LinuxScheduler) -> None:
    process.pop("scheduler", None)
    if given.policy != api.SCHED_NONE:
        numbers = {name: getattr(given, name) for name in SCHEDULER_NUMBERS if getattr(given, name)}
        flags = [api.LinuxSchedulerFlag.Name(flag) for flag in given.flags]
        process["scheduler"] = {
            "policy": api.LinuxSchedulerPolicy.Name(given.policy),
            **numbers,
            **({"flags": flags} if flags else {}),
        }


def _seccomp(given: api.LinuxSeccomp) -> Spec:
    result: Spec = {
        "defaultAction": given.default_action,
        "architectures": list(given.architectures),
        "flags": list(given.flags),
        "syscalls": [_syscall(entry) for entry in given.syscalls],
    }
    if given.HasField("default_errno"):
        result["defaultErrnoRet"] = given.default_errno.value
    if given.listener_path:
        result |= {"listenerPath": given.listener_path, "listenerMetadata": given.listener_metadata}
    return result


def _syscall(given: api.LinuxSyscall) -> Spec:
    result: Spec = {
        "names": list(given.names),
        "action": given.action,
        "args": [
            {"index": a.index, "value": a.value, "valueTwo": a.value_two, "op": a.op}
            for a in given.args
        ],
    }
    if given.HasField("errno_ret"):
        result["errnoRet"] = given.errno_ret.value
    return result


def _namespace(linux: Spec, given: api.LinuxNamespace) -> None:
    removed = removal(given.type)
    kind = given.type if removed is None else removed
    linux["namespaces"] = [entry for entry in linux["namespaces"] if entry["type"] != kind]
    if removed is None:
        linux["namespaces"].append({"type": kind, **({"path": given.path} if given.path else {})})


def _memory_policy(given: api.LinuxMemoryPolicy) -> Spec:
    result: Spec = {"mode": api.MpolMode.Name(given.mode), "nodes": given.nodes}
    if given.flags:
        result["flags"] = [api.MpolFlag.Name(flag) for flag in given.flags]
    return result


def _resources(linux: Spec, given: api.LinuxResources) -> None:
    resources = linux["resources"]
    memory = {
        key: getattr(given.memory, name).value
        for name, key in MEMORY.items()
        if given.memory.HasField(name)  # type: ignore[arg-type]
    }
    if "limit" in memory:
        memory.setdefault("swap", memory["limit"])  # as for a limit that CRI sets: no swap
    cpu = {
        key: getattr(given.cpu, name).value
        for name, key in CPU.items()
        if given.cpu.HasField(name)  # type: ignore[arg-type]
    }
    cpu |= {
        key: getattr(given.cpu, name) for name, key in CPU_SETS.items() if getattr(given.cpu, name)
    }
    for table, values in (("memory", memory), ("cpu", cpu), ("unified", dict(given.unified))):
        if values:
            resources[table] = {**resources.get(table, {}), **values}
    if given.hugepage_limits:
        sizes = {entry["pageSize"]: entry for entry in resources.get("hugepageLimits", ())}
        sizes |= {
            h.page_size: {"pageSize": h.page_size, "limit": h.limit} for h in given.hugepage_limits
        }
        resources["hugepageLimits"] = list(sizes.values())
    if given.HasField("pids"):
        resources["pids"] = {"limit": given.pids.limit}
    for rule in given.devices:
        entry: Spec = {"allow": rule.allow, "access": rule.access}
        if rule.type:
            entry["type"] = rule.type
        for name in ("major", "minor"):
            if rule.HasField(name):  # type: ignore[arg-type]
                entry[name] = getattr(rule, name).value
        resources.setdefault("devices", []).append(entry)


def _rdt(linux: Spec, asked: api.LinuxContainerAdjustment, of_class: Callable[[str], Spec]) -> None:
    if asked.resources.HasField("rdt_class") or asked.rdt.remove:
        linux.pop("intelRdt", None)
    if asked.resources.rdt_class.value:
        linux["intelRdt"] = of_class(asked.resources.rdt_class.value)
    if asked.rdt.HasField("clos_id"):
        linux.setdefault("intelRdt", {})["closID"] = asked.rdt.clos_id.value
    if asked.rdt.HasField("schemata"):
        linux.setdefault("intelRdt", {})["schemata"] = list(asked.rdt.schemata.value)
    if asked.rdt.HasField("enable_monitoring"):
        linux.setdefault("intelRdt", {})["enableMonitoring"] = asked.rdt.enable_monitoring.value


def _mounts(spec: Spec, given: Iterable[api.Mount]) -> None:
    """One of the same destination is replaced; parents come before what is mounted below them."""
    mounts = list(spec["mounts"])
    for wanted in given:
        removed = removal(wanted.destination)
        destination = wanted.destination if removed is None else removed
        mounts = [mount for mount in mounts if mount["destination"] != destination]
        if removed is not None:
            continue
        if not destination.startswith("/") or destination == "/":
            raise InvalidArgument(f"NRI: cannot mount at {destination[:200]!r}")
        mount: Spec = {
            "destination": destination,
            "source": wanted.source,
            "options": list(wanted.options),
        }
        mounts.append({**mount, "type": wanted.type} if wanted.type else mount)
        _propagation(spec["linux"], wanted.options)
    spec["mounts"] = sorted(
        mounts, key=lambda mount: len([p for p in mount["destination"].split("/") if p])
    )


def _propagation(linux: Spec, options: Iterable[str]) -> None:
    """What the container's root needs, so that mounts pass through this one."""
    if "rshared" in options:
        linux["rootfsPropagation"] = "rshared"
    elif "rslave" in options and linux.get("rootfsPropagation") != "rshared":
        linux["rootfsPropagation"] = "rslave"
