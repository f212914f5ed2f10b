"""Checks that the fields of a configuration fit each other, before anything is created.

`check` raises InvalidSpec for the first fault. Only the kernel can detect some faults, such as a
namespace path of the wrong kind or an LSM that is off. The code that uses the field then
reports the fault. Rules: runtime-spec 1.3 config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath

from pyrunc.abi.process import IOPRIO_CLASSES, RLIMITS, SCHED_FLAGS, SCHED_POLICIES
from pyrunc.errors import InvalidSpec
from pyrunc.spec.model import KERNEL_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.spec.model import Device, Hook, Linux, Mount, Process, Spec

PROPAGATIONS = (
    "shared",
    "slave",
    "private",
    "unbindable",
    "rshared",
    "rslave",
    "rprivate",
    "runbindable",
)
PERSONALITIES = {"LINUX": 0, "LINUX32": 8}
MEMORY_MODES = {
    "MPOL_DEFAULT": 0, "MPOL_PREFERRED": 1, "MPOL_BIND": 2, "MPOL_INTERLEAVE": 3, "MPOL_LOCAL": 4,
    "MPOL_PREFERRED_MANY": 5, "MPOL_WEIGHTED_INTERLEAVE": 6,
}  # fmt: skip
MEMORY_FLAGS = {
    "MPOL_F_STATIC_NODES": 1 << 15,
    "MPOL_F_RELATIVE_NODES": 1 << 14,
    "MPOL_F_NUMA_BALANCING": 1 << 13,
}
# Bounds the memory of a list such as 0-4294967295; the largest NR_CPUS is 8192.
CPUS_LIMIT = 65536
IPC_SYSCTLS = frozenset(
    f"kernel.{name}"
    for name in (
        "msgmax",
        "msgmnb",
        "msgmni",
        "sem",
        "shmall",
        "shmmax",
        "shmmni",
        "shm_rmid_forced",
    )
)


def check(spec: Spec) -> None:
    """Raise InvalidSpec for the first rule that `spec` breaks."""
    if spec.root is None:
        raise InvalidSpec("root", "is required")
    if not spec.root.path:
        raise InvalidSpec("root.path", "must not be empty")
    check_namespaces(spec.linux)
    _names(spec)
    for i, mount in enumerate(spec.mounts):
        _mount(mount, spec, f"mounts[{i}]")
    if spec.process is not None:
        check_process(spec.process)
    for kind, hooks in (
        ("prestart", spec.hooks.prestart),
        ("createRuntime", spec.hooks.create_runtime),
        ("createContainer", spec.hooks.create_container),
        ("startContainer", spec.hooks.start_container),
        ("poststart", spec.hooks.poststart),
        ("poststop", spec.hooks.poststop),
    ):
        for i, hook in enumerate(hooks):
            _hook(hook, f"hooks.{kind}[{i}]")
    _linux(spec.linux)


def check_process(process: Process) -> None:
    """Check a process without the rest of the configuration, such as the process of an exec. Raises
    InvalidSpec."""
    if not process.args:
        raise InvalidSpec("process.args", "must not be empty")
    if not process.cwd.startswith("/"):
        raise InvalidSpec("process.cwd", "Cwd must be an absolute path")
    for i, variable in enumerate(process.env):
        if variable.find("=") < 1:
            raise InvalidSpec(f"process.env[{i}]", not_a_variable(variable))
    seen: set[str] = set()
    for i, limit in enumerate(process.rlimits):
        at = f"process.rlimits[{i}]"
        if limit.type not in RLIMITS:
            raise InvalidSpec(f"{at}.type", f"unknown resource limit {limit.type!r}")
        # runtime-spec, "rlimits": an error MUST be generated for duplicate entries.
        if limit.type in seen:
            raise InvalidSpec(f"{at}.type", f"{limit.type} appears twice")
        if limit.soft > limit.hard:
            raise InvalidSpec(at, f"soft limit {limit.soft} is above hard limit {limit.hard}")
        seen.add(limit.type)
    _scheduling(process)
    affinity = process.exec_cpu_affinity
    if affinity is not None:
        cpu_list(affinity.initial, "process.execCPUAffinity.initial")
        cpu_list(affinity.final, "process.execCPUAffinity.final")


def not_a_variable(entry: str) -> str:
    """Return an error text for a malformed entry of an environment. The text tells only the entry's
    length: the entry may be a secret, and error texts get into logs and into kubelet's events."""
    return f"an entry of {len(entry)} characters is not NAME=VALUE"


def _scheduling(process: Process) -> None:
    scheduler, io = process.scheduler, process.io_priority
    if scheduler is not None:
        at, policy = "process.scheduler", scheduler.policy
        if policy not in SCHED_POLICIES:
            raise InvalidSpec(f"{at}.policy", f"unknown policy {policy!r}")
        if not -20 <= scheduler.nice <= 19:
            raise InvalidSpec(f"{at}.nice", f"{scheduler.nice} is not between -20 and 19")
        if scheduler.priority and policy not in ("SCHED_FIFO", "SCHED_RR"):
            raise InvalidSpec(f"{at}.priority", "only SCHED_FIFO and SCHED_RR have a priority")
        if policy != "SCHED_DEADLINE" and (
            scheduler.runtime or scheduler.deadline or scheduler.period
        ):
            raise InvalidSpec(at, "only SCHED_DEADLINE has runtime, deadline and period")
        for i, flag in enumerate(scheduler.flags):
            if flag not in SCHED_FLAGS:
                raise InvalidSpec(f"{at}.flags[{i}]", f"unknown flag {flag!r}")
    if io is not None:
        if io.klass not in IOPRIO_CLASSES:
            raise InvalidSpec("process.ioPriority.class", f"unknown class {io.klass!r}")
        if not 0 <= io.priority <= 7:
            raise InvalidSpec(
                "process.ioPriority.priority", f"{io.priority} is not between 0 and 7"
            )


def cpu_list(text: str, path: str) -> tuple[int, ...]:
    """Parse `0-3,7` to (0, 1, 2, 3, 7); cpuset(7), "List format". Raises InvalidSpec."""
    cpus: set[int] = set()
    listed = 0
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not part and not text.strip():
            continue
        last = last if dash else first
        # Python refuses to convert numbers of more than 4300 digits.
        if not all(n.isascii() and n.isdigit() and len(n) < 10 for n in (first, last)):
            raise InvalidSpec(path, f"{text!r} is not a list such as 0-3,7")
        if not int(first) <= int(last) < CPUS_LIMIT:
            raise InvalidSpec(path, f"{part} is not a range")
        # Counted with repetitions: nine bytes can name the same 65,536 CPUs again, any number of
        # times.
        listed += int(last) - int(first) + 1
        if listed > CPUS_LIMIT:
            raise InvalidSpec(path, f"more than {CPUS_LIMIT} numbers")
        cpus.update(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))


def check_namespaces(linux: Linux) -> None:
    """Check types and paths of the namespaces. Also check that id mappings and clock offsets come
    with the namespace that they need. Raises InvalidSpec."""
    seen: set[str] = set()
    for i, entry in enumerate(linux.namespaces):
        at = f"linux.namespaces[{i}]"
        if entry.type not in KERNEL_NAMES:
            raise InvalidSpec(f"{at}.type", f"unknown namespace type {entry.type!r}")
        if entry.type in seen:
            raise InvalidSpec(f"{at}.type", f"the {entry.type} namespace appears twice")
        if entry.path and not entry.path.startswith("/"):
            raise InvalidSpec(f"{at}.path", "must be absolute")
        seen.add(entry.type)
    user = linux.namespace("user")
    maps = linux.uid_mappings or linux.gid_mappings
    if maps and user is None:
        raise InvalidSpec("linux.uidMappings", "mappings need a user namespace")
    if user is not None and not user.path and not (linux.uid_mappings and linux.gid_mappings):
        raise InvalidSpec("linux.uidMappings", "a new user namespace needs uid and gid mappings")
    time = linux.namespace("time")
    if linux.time_offsets and (time is None or time.path):
        raise InvalidSpec("linux.timeOffsets", "need a new time namespace")
    for clock in linux.time_offsets:
        if clock not in ("monotonic", "boottime"):
            raise InvalidSpec(
                f"linux.timeOffsets.{clock}", "the clock must be monotonic or boottime"
            )


def _names(spec: Spec) -> None:
    uts = spec.linux.namespace("uts")
    for key, name in (("hostname", spec.hostname), ("domainname", spec.domainname)):
        if name and uts is None:
            raise InvalidSpec(key, "needs a uts namespace other than the host's")
        # __NEW_UTS_LEN: sethostname(2) answers EINVAL for more, late and without a name.
        if len(name.encode("utf-8", "surrogateescape")) > 64:
            raise InvalidSpec(key, "is longer than 64 bytes")


def _mount(mount: Mount, spec: Spec, path: str) -> None:
    if not mount.destination:
        raise InvalidSpec(f"{path}.destination", "must not be empty")
    if bool(mount.uid_mappings) != bool(mount.gid_mappings):
        raise InvalidSpec(path, "needs both uidMappings and gidMappings, or neither")
    options = mount.options
    bind = "bind" in options or "rbind" in options
    idmap = "idmap" in options or "ridmap" in options
    if (idmap or mount.uid_mappings) and not bind:
        raise InvalidSpec(f"{path}.options", "only bind mounts can be mapped to other ids")
    if idmap and not mount.uid_mappings and spec.linux.namespace("user") is None:
        raise InvalidSpec(f"{path}.options", "idmap needs mappings or a user namespace")
    if "remount" in options:
        return
    if bind and not mount.source:
        raise InvalidSpec(f"{path}.source", "is required for a bind mount")
    if not bind and not mount.type:
        raise InvalidSpec(f"{path}.type", "is required unless the mount is a bind")


def _hook(hook: Hook, path: str) -> None:
    if not hook.path.startswith("/"):
        raise InvalidSpec(f"{path}.path", "must be absolute")
    if hook.timeout_s is not None and hook.timeout_s <= 0:
        raise InvalidSpec(f"{path}.timeout", "must be above zero")
    # Python's posix_spawn refuses an empty first argument and a variable without a name, but only
    # when the container is made already.
    if hook.args and not hook.args[0]:
        raise InvalidSpec(f"{path}.args[0]", "is empty")
    for i, entry in enumerate(hook.env or ()):
        if not entry.partition("=")[0]:
            raise InvalidSpec(f"{path}.env[{i}]", not_a_variable(entry))


def _linux(linux: Linux) -> None:
    own_mounts = linux.namespace("mount") is not None
    for key, paths in (
        ("maskedPaths", linux.masked_paths),
        ("readonlyPaths", linux.readonly_paths),
    ):
        if paths and not own_mounts:
            raise InvalidSpec(f"linux.{key}", "need a mount namespace")
        for i, value in enumerate(paths):
            if not value.startswith("/"):
                raise InvalidSpec(f"linux.{key}[{i}]", f"{value!r} is not absolute")
    if linux.rootfs_propagation and linux.rootfs_propagation not in PROPAGATIONS:
        raise InvalidSpec("linux.rootfsPropagation", f"unknown value {linux.rootfs_propagation!r}")
    for i, device in enumerate(linux.devices):
        _device(device, f"linux.devices[{i}]")
    for key, value in linux.sysctl.items():
        _sysctl(key, value, linux)
    if linux.net_devices and linux.namespace("network") is None:
        raise InvalidSpec("linux.netDevices", "need a network namespace")
    for host, name in linux.net_devices.items():
        _link_name(host, host)
        _link_name(name, host)
    if linux.personality is not None and linux.personality.domain not in PERSONALITIES:
        raise InvalidSpec(
            "linux.personality.domain", f"unknown domain {linux.personality.domain!r}"
        )
    if linux.intel_rdt is not None:
        _intel_rdt(linux.intel_rdt)
    policy = linux.memory_policy
    if policy is not None:
        if policy.mode not in MEMORY_MODES:
            raise InvalidSpec("linux.memoryPolicy.mode", f"unknown mode {policy.mode!r}")
        for i, flag in enumerate(policy.flags):
            if flag not in MEMORY_FLAGS:
                raise InvalidSpec(f"linux.memoryPolicy.flags[{i}]", f"unknown flag {flag!r}")


def _intel_rdt(rdt: Mapping[str, Any]) -> None:
    at = "linux.intelRdt"
    name = rdt.get("closID") or "/"
    if name != "/" and ("/" in name or name in (".", "..")):
        raise InvalidSpec(f"{at}.closID", f"{name!r} is not the name of a resctrl group")
    for line in (
        rdt.get("l3CacheSchema"),
        rdt.get("memBwSchema"),
        *rdt.get("schemata", ()),
    ):
        if line and "\n" in line:
            raise InvalidSpec(at, f"{line!r} is not a single line")
    if rdt.get("memBwSchema") and not rdt["memBwSchema"].startswith("MB:"):
        raise InvalidSpec(f"{at}.memBwSchema", "must begin with 'MB:'")


def _device(device: Device, path: str) -> None:
    if device.type not in ("c", "u", "b", "p"):
        raise InvalidSpec(f"{path}.type", f"unknown device type {device.type!r}")
    if posixpath.normpath("/" + device.path.lstrip("/")) == "/":
        raise InvalidSpec(f"{path}.path", f"{device.path!r} is the root folder")
    if not device.path.startswith("/"):
        raise InvalidSpec(f"{path}.path", "must be absolute")


def _link_name(name: str, key: str) -> None:
    # IFNAMSIZ, and what dev_valid_name() refuses (net/core/dev.c).
    if not 0 < len(name.encode()) <= 15 or name in (".", "..") or any(c in "/: \t\n" for c in name):
        raise InvalidSpec(
            f"linux.netDevices.{key}", f"{name!r} is not the name of a network device"
        )


def sysctl_path(key: str) -> str:
    """Return the path below /proc/sys of the setting `key`. The separator is `.` or `/`, whichever
    comes first in `key` (sysctl(8))."""
    dot, slash = key.find("."), key.find("/")
    if slash >= 0 and (dot < 0 or slash < dot):
        return key
    return key.translate({ord("."): "/", ord("/"): "."})


def sysctl_namespace(key: str) -> str:
    """Return the type of the namespace to which a setting belongs. Raises InvalidSpec for a setting
    that belongs to no namespace, for an invalid name, and for kernel.hostname, which has its own
    property."""
    at = f"linux.sysctl.{key}"
    parts = sysctl_path(key).split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidSpec(at, "is not the name of a setting")
    dotted = ".".join(parts)
    if dotted in IPC_SYSCTLS or dotted.startswith("fs.mqueue."):
        return "ipc"
    # As in runc: one of the two would overwrite the other.
    if dotted == "kernel.hostname":
        raise InvalidSpec(at, "use the hostname property")
    # All of net.*: in other network namespaces than the first, the kernel makes settings that are
    # not their own read-only (ensure_safe_net_sysctl, net/sysctl_net.c).
    owners = {"net": "network", "user": "user"}
    owner = "uts" if dotted == "kernel.domainname" else owners.get(parts[0])
    if owner is None:
        raise InvalidSpec(at, "is not a setting of an ipc, network, user or uts namespace")
    return owner


def _sysctl(key: str, value: str, linux: Linux) -> None:
    """Check that the setting belongs to a namespace of the container, and that its value is one
    line (CVE-2022-0811)."""
    needed = sysctl_namespace(key)
    if "\n" in value:
        raise InvalidSpec(f"linux.sysctl.{key}", "the value must be one line")
    if linux.namespace(needed) is None:
        raise InvalidSpec(
            f"linux.sysctl.{key}", f"needs a {needed} namespace other than the host's"
        )


def settings_by_namespace(spec: Spec) -> dict[str, str]:
    """Return a dict: namespace type -> JSON path of a setting (sysctl, hostname, domainname,
    network device) that needs a namespace of this type. Without such a namespace, the setting would
    change the host."""
    paths = {sysctl_namespace(key): f"linux.sysctl.{key}" for key in spec.linux.sysctl}
    for key, name in (("hostname", spec.hostname), ("domainname", spec.domainname)):
        if name:
            paths["uts"] = key
    if spec.linux.net_devices:
        paths["network"] = "linux.netDevices"
    return paths
