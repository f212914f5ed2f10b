"""Applies a merged adjustment to a container's OCI configuration, before the configuration is
compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.nri.convert import CPU, CPU_SETS, DEVICE_OWNER, HOOKS, MEMORY, ResourceField
from cri_server.nri.merge import removal
from cri_server.spec.mounts import by_depth
from pyrunc.errors import InvalidArgument

Spec = dict[str, Any]
SCHEDULER_NUMBERS = ("nice", "priority", "runtime", "deadline", "period")


def apply(
    spec: Spec,
    adjustment: api.ContainerAdjustment,
    clamp_oom_score_adj: Callable[[int], int],
    block_io: Callable[[str], Spec],
    rdt: Callable[[str], Spec],
) -> None:
    """Apply `adjustment` to `spec`. Ignores CDI devices: the caller applies their edits
    (`cri_server.spec.cdi`).

    `clamp_oom_score_adj`: a function that raises an oom_score_adj to the lowest value that the
    server may set. `block_io`, `rdt`: functions that return the OCI object for the name of a class.

    Raises InvalidArgument for values that OCI does not permit.
    """
    process, linux, linux_adjustment = spec["process"], spec["linux"], adjustment.linux
    _pairs(spec, "annotations", adjustment.annotations)
    _environment(process, adjustment.env)
    if adjustment.args:
        process["args"] = list(adjustment.args)
    _hooks(spec, adjustment.hooks)
    for device in linux_adjustment.devices:
        _device(linux, device)
    if linux_adjustment.cgroups_path:
        linux["cgroupsPath"] = linux_adjustment.cgroups_path
    if linux_adjustment.HasField("oom_score_adj"):
        process["oomScoreAdj"] = clamp_oom_score_adj(linux_adjustment.oom_score_adj.value)
    _io_priority(process, linux_adjustment)
    if linux_adjustment.HasField("scheduler"):
        _scheduler(process, linux_adjustment.scheduler)
    if linux_adjustment.HasField("seccomp_policy"):
        linux["seccomp"] = _seccomp(linux_adjustment.seccomp_policy)
    for namespace in linux_adjustment.namespaces:
        _namespace(linux, namespace)
    _pairs(linux, "sysctl", linux_adjustment.sysctl)
    _pairs(
        linux,
        "netDevices",
        linux_adjustment.net_devices,
        lambda device: {"name": device.name} if device.name else {},
    )
    if linux_adjustment.HasField("memory_policy"):
        linux["memoryPolicy"] = _memory_policy(linux_adjustment.memory_policy)
    _resources(linux, linux_adjustment.resources)
    if linux_adjustment.resources.HasField("blockio_class"):
        linux["resources"].pop("blockIO", None)
        if linux_adjustment.resources.blockio_class.value:
            linux["resources"]["blockIO"] = block_io(linux_adjustment.resources.blockio_class.value)
    _rdt(linux, linux_adjustment, rdt)
    _mounts(spec, adjustment.mounts)
    for limit in adjustment.rlimits:
        others = [entry for entry in process.get("rlimits", ()) if entry["type"] != limit.type]
        process["rlimits"] = [*others, {"type": limit.type, "hard": limit.hard, "soft": limit.soft}]


def _pairs(
    owner: Spec,
    key: str,
    changes: Mapping[str, Any],
    value: Callable[[Any], Any] = lambda changes: changes,
) -> None:
    if not changes:
        return
    # Removals come first: a plugin that sends `-KEY` and KEY replaces the value, in either order.
    entries = owner.setdefault(key, {})
    for name in changes:
        removed = removal(name)
        if removed is not None:
            entries.pop(removed, None)
    for name, entry in changes.items():
        if removal(name) is None:
            entries[name] = value(entry)


def _environment(process: Spec, variables: Iterable[api.KeyValue]) -> None:
    """Set or remove environment variables of `process`. An existing variable keeps its position, a
    new one is appended. Raises InvalidArgument."""
    lines = {line.partition("=")[0]: line for line in process["env"]}
    for entry in variables:
        removed = removal(entry.key)
        if removed is not None:
            lines.pop(removed, None)
        elif not entry.key or "=" in entry.key or "\0" in entry.key + entry.value:
            name = entry.key.partition("=")[0]  # the text behind `=` may be a secret
            raise InvalidArgument(
                f"NRI: environment variable {name[:80]!r}: its name is empty or contains '=',"
                " or its name or value contains a NUL byte"
            )
        else:
            lines[entry.key] = f"{entry.key}={entry.value}"
    process["env"] = list(lines.values())


def _hooks(spec: Spec, hooks: api.Hooks) -> None:
    for name, key in HOOKS.items():
        for hook in getattr(hooks, name):
            if not hook.path.startswith("/"):
                raise InvalidArgument(f"NRI: hook {hook.path[:200]!r} is not an absolute path")
            entry: Spec = {"path": hook.path, "args": list(hook.args), "env": list(hook.env)}
            if hook.HasField("timeout"):
                entry["timeout"] = hook.timeout.value
            spec.setdefault("hooks", {}).setdefault(key, []).append(entry)


def _device(linux: Spec, requested: api.LinuxDevice) -> None:
    removed = removal(requested.path)
    path = requested.path if removed is None else removed
    devices = [device for device in linux.get("devices", ()) if device["path"] != path]
    if removed is None:
        number = {"type": requested.type, "major": requested.major, "minor": requested.minor}
        device: Spec = {"path": path, **number}
        for name, key in DEVICE_OWNER.items():
            if requested.HasField(name):  # type: ignore[arg-type]
                device[key] = getattr(requested, name).value
        devices.append(device)
        # The device cgroup denies every device that no rule allows, whatever the mode of its node
        # permits.
        rule = {"allow": True, **number, "access": _access(requested)}
        linux["resources"].setdefault("devices", []).append(rule)
    linux["devices"] = devices


def _access(device: api.LinuxDevice) -> str:
    """Return the cgroup access of a device as NRI's Go module does: `r` and `w` if the device's
    file mode grants them to user, group or others, and `m` (mknod) for a block device."""
    mode = device.file_mode.value if device.HasField("file_mode") else 0o666
    read, write = ("r" if mode & 0o444 else ""), ("w" if mode & 0o222 else "")
    return read + write + ("m" if device.type == "b" else "")


def _io_priority(process: Spec, adjustment: api.LinuxContainerAdjustment) -> None:
    if not adjustment.HasField("io_priority"):
        return
    kind = getattr(adjustment.io_priority, "class")
    process.pop("ioPriority", None)
    if kind != api.IOPRIO_CLASS_NONE:
        process["ioPriority"] = {
            "class": api.IOPrioClass.Name(kind),
            "priority": adjustment.io_priority.priority,
        }


def _scheduler(process: Spec, scheduler: api.LinuxScheduler) -> None:
    process.pop("scheduler", None)
    if scheduler.policy != api.SCHED_NONE:
        numbers = {
            name: getattr(scheduler, name) for name in SCHEDULER_NUMBERS if getattr(scheduler, name)
        }
        flags = [api.LinuxSchedulerFlag.Name(flag) for flag in scheduler.flags]
        process["scheduler"] = {
            "policy": api.LinuxSchedulerPolicy.Name(scheduler.policy),
            **numbers,
            **({"flags": flags} if flags else {}),
        }


def _seccomp(policy: api.LinuxSeccomp) -> Spec:
    result: Spec = {
        "defaultAction": policy.default_action,
        "architectures": list(policy.architectures),
        "flags": list(policy.flags),
        "syscalls": [_syscall(entry) for entry in policy.syscalls],
    }
    if policy.HasField("default_errno"):
        result["defaultErrnoRet"] = policy.default_errno.value
    if policy.listener_path:
        result |= {
            "listenerPath": policy.listener_path,
            "listenerMetadata": policy.listener_metadata,
        }
    return result


def _syscall(rule: api.LinuxSyscall) -> Spec:
    result: Spec = {
        "names": list(rule.names),
        "action": rule.action,
        "args": [
            {"index": a.index, "value": a.value, "valueTwo": a.value_two, "op": a.op}
            for a in rule.args
        ],
    }
    if rule.HasField("errno_ret"):
        result["errnoRet"] = rule.errno_ret.value
    return result


def _namespace(linux: Spec, namespace: api.LinuxNamespace) -> None:
    removed = removal(namespace.type)
    kind = namespace.type if removed is None else removed
    linux["namespaces"] = [entry for entry in linux["namespaces"] if entry["type"] != kind]
    if removed is None:
        linux["namespaces"].append(
            {"type": kind, **({"path": namespace.path} if namespace.path else {})}
        )


def _memory_policy(policy: api.LinuxMemoryPolicy) -> Spec:
    result: Spec = {"mode": api.MpolMode.Name(policy.mode), "nodes": policy.nodes}
    if policy.flags:
        result["flags"] = [api.MpolFlag.Name(flag) for flag in policy.flags]
    return result


def _resources(linux: Spec, adjustment: api.LinuxResources) -> None:
    resources = linux["resources"]
    memory = _set_fields(adjustment.memory, MEMORY)
    if "limit" in memory:
        memory.setdefault("swap", memory["limit"])  # no swap, as for CRI's limit
    cpu = _set_fields(adjustment.cpu, CPU)
    cpu |= {
        name: getattr(adjustment.cpu, name) for name in CPU_SETS if getattr(adjustment.cpu, name)
    }
    for table, values in (("memory", memory), ("cpu", cpu), ("unified", dict(adjustment.unified))):
        if values:
            resources[table] = {**resources.get(table, {}), **values}
    if adjustment.hugepage_limits:
        sizes = {entry["pageSize"]: entry for entry in resources.get("hugepageLimits", ())}
        sizes |= {
            h.page_size: {"pageSize": h.page_size, "limit": h.limit}
            for h in adjustment.hugepage_limits
        }
        resources["hugepageLimits"] = list(sizes.values())
    if adjustment.HasField("pids"):
        resources["pids"] = {"limit": adjustment.pids.limit}
    for rule in adjustment.devices:
        entry: Spec = {"allow": rule.allow, "access": rule.access}
        if rule.type:
            entry["type"] = rule.type
        for name in ("major", "minor"):
            if rule.HasField(name):  # type: ignore[arg-type]
                entry[name] = getattr(rule, name).value
        resources.setdefault("devices", []).append(entry)


def _set_fields(message: Any, table: Mapping[str, ResourceField]) -> Spec:
    """Return the fields that are set in `message`, as {key in an OCI configuration: value}."""
    return {
        field.key: getattr(message, name).value
        for name, field in table.items()
        if message.HasField(name)
    }


def _rdt(
    linux: Spec, adjustment: api.LinuxContainerAdjustment, of_class: Callable[[str], Spec]
) -> None:
    if adjustment.resources.HasField("rdt_class") or adjustment.rdt.remove:
        linux.pop("intelRdt", None)
    if adjustment.resources.rdt_class.value:
        linux["intelRdt"] = of_class(adjustment.resources.rdt_class.value)
    if adjustment.rdt.HasField("clos_id"):
        linux.setdefault("intelRdt", {})["closID"] = adjustment.rdt.clos_id.value
    if adjustment.rdt.HasField("schemata"):
        linux.setdefault("intelRdt", {})["schemata"] = list(adjustment.rdt.schemata.value)
    if adjustment.rdt.HasField("enable_monitoring"):
        linux.setdefault("intelRdt", {})["enableMonitoring"] = (
            adjustment.rdt.enable_monitoring.value
        )


def _mounts(spec: Spec, requested: Iterable[api.Mount]) -> None:
    """Add the requested mounts to `spec`, in place of mounts with the same destination. The
    destination `-PATH` removes the mount at PATH. Mounts are sorted so that each precedes the
    mounts below it."""
    mounts = list(spec["mounts"])
    for request in requested:
        removed = removal(request.destination)
        destination = request.destination if removed is None else removed
        mounts = [mount for mount in mounts if mount["destination"] != destination]
        if removed is not None:
            continue
        if not destination.startswith("/") or destination == "/":
            raise InvalidArgument(f"NRI: cannot mount at {destination[:200]!r}")
        mount: Spec = {
            "destination": destination,
            "source": request.source,
            "options": list(request.options),
        }
        mounts.append({**mount, "type": request.type} if request.type else mount)
        _propagation(spec["linux"], request.options)
    spec["mounts"] = by_depth(mounts)


def _propagation(linux: Spec, options: Iterable[str]) -> None:
    """Set `rootfsPropagation` to `rshared` or `rslave` if a mount's `options` have this
    propagation: the root file system must then have it, too. Never lowers rshared to rslave."""
    if "rshared" in options:
        linux["rootfsPropagation"] = "rshared"
    elif "rslave" in options and linux.get("rootfsPropagation") != "rshared":
        linux["rootfsPropagation"] = "rslave"
