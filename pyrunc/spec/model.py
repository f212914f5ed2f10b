"""The objects of `config.json`, runtime-spec 1.3, Linux: one class per JSON object, snake_case
for camelCase.

Absent lists are empty tuples, absent objects None. `resources`, `seccomp` and `intel_rdt` stay JSON
objects: the cgroup and seccomp compilers parse them.
"""

from __future__ import annotations

from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


# The specification's words -> names in /proc/PID/ns and `abi.clone.NAMESPACES`
KERNEL_NAMES = {
    "mount": "mnt",
    "cgroup": "cgroup",
    "uts": "uts",
    "ipc": "ipc",
    "user": "user",
    "pid": "pid",
    "network": "net",
    "time": "time",
}


class IdMap(Value):
    """Maps a range of `size` ids. The range begins at `container_id` in the user namespace, and at
    `host_id` outside."""

    container_id: int
    host_id: int
    size: int


class Mount(Value):
    """One entry of `mounts`. `options` are not parsed."""

    destination: str
    type: str = ""
    source: str = ""
    options: tuple[str, ...] = ()
    uid_mappings: tuple[IdMap, ...] = ()
    gid_mappings: tuple[IdMap, ...] = ()


class User(Value):
    """`process.user`, with ids as the container sees them. `umask` None: the default 0022."""

    uid: int = 0
    gid: int = 0
    umask: int | None = None
    additional_gids: tuple[int, ...] = ()


class Rlimit(Value):
    """One entry of `rlimits`. `type`: such as `RLIMIT_NOFILE`; `soft`, `hard`: the largest uint64
    means unlimited."""

    type: str
    soft: int
    hard: int


class Capabilities(Value):
    """The five capability sets, each a list of names such as `CAP_KILL`."""

    bounding: tuple[str, ...] = ()
    effective: tuple[str, ...] = ()
    inheritable: tuple[str, ...] = ()
    permitted: tuple[str, ...] = ()
    ambient: tuple[str, ...] = ()


class ConsoleSize(Value):
    """A terminal's size in characters."""

    height: int
    width: int


class Scheduler(Value):
    """Arguments of sched_setattr(2); the times are nanoseconds."""

    policy: str
    nice: int = 0
    priority: int = 0
    flags: tuple[str, ...] = ()
    runtime: int = 0
    deadline: int = 0
    period: int = 0


class IoPriority(Value):
    """Arguments of ioprio_set(2)."""

    klass: str
    priority: int = 0


class CpuAffinity(Value):
    """CPU lists such as `0-3,7` for processes that enter a running container."""

    initial: str = ""
    final: str = ""


class Process(Value):
    """The object `process` of the configuration, or the process object of an exec request."""

    args: tuple[str, ...] = ()
    cwd: str = "/"
    env: tuple[str, ...] = ()
    user: User = User()
    terminal: bool = False
    console_size: ConsoleSize | None = None
    capabilities: Capabilities | None = None
    rlimits: tuple[Rlimit, ...] = ()
    no_new_privileges: bool = False
    apparmor_profile: str = ""
    selinux_label: str = ""
    oom_score_adj: int | None = None
    scheduler: Scheduler | None = None
    io_priority: IoPriority | None = None
    exec_cpu_affinity: CpuAffinity | None = None


class Root(Value):
    """The object `root`. `path`: absolute, or relative to the bundle."""

    path: str
    readonly: bool = False


class Hook(Value):
    """An executable that the runtime runs at a point of the container's life. `env` None: the hook
    has no `env`; `timeout_s` None: no limit."""

    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] | None = None
    timeout_s: int | None = None


class Hooks(Value):
    """Hooks by kind, in the order of a container's life."""

    prestart: tuple[Hook, ...] = ()
    create_runtime: tuple[Hook, ...] = ()
    create_container: tuple[Hook, ...] = ()
    start_container: tuple[Hook, ...] = ()
    poststart: tuple[Hook, ...] = ()
    poststop: tuple[Hook, ...] = ()


class Namespace(Value):
    """One entry of `namespaces`. `type`: as in the specification (`mount`, `network`, …); `path`:
    empty for a new namespace."""

    type: str
    path: str = ""


class Device(Value):
    """A device file. `type`: c, u, b or p; `file_mode`: without the type bits."""

    path: str
    type: str
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    uid: int = 0
    gid: int = 0


class TimeOffset(Value):
    """The difference between a clock in a time namespace and the host's clock."""

    secs: int = 0
    nanosecs: int = 0


class Personality(Value):
    """The execution domain, `LINUX` or `LINUX32`."""

    domain: str
    flags: tuple[str, ...] = ()


class MemoryPolicy(Value):
    """Arguments of set_mempolicy(2)."""

    mode: str
    nodes: str = ""
    flags: tuple[str, ...] = ()


class Linux(Value):
    """The object `linux`."""

    namespaces: tuple[Namespace, ...] = ()
    uid_mappings: tuple[IdMap, ...] = ()
    gid_mappings: tuple[IdMap, ...] = ()
    time_offsets: Mapping[str, TimeOffset] = {}
    devices: tuple[Device, ...] = ()
    net_devices: Mapping[str, str] = {}
    cgroups_path: str = ""
    resources: Mapping[str, Any] | None = None
    intel_rdt: Mapping[str, Any] | None = None
    memory_policy: MemoryPolicy | None = None
    sysctl: Mapping[str, str] = {}
    seccomp: Mapping[str, Any] | None = None
    rootfs_propagation: str = ""
    masked_paths: tuple[str, ...] = ()
    readonly_paths: tuple[str, ...] = ()
    mount_label: str = ""
    personality: Personality | None = None

    def namespace(self, kind: str) -> Namespace | None:
        """Return the entry of `namespaces` with the type `kind`. None if there is none; the
        container then stays in the runtime's namespace of this type."""
        for entry in self.namespaces:
            if entry.type == kind:
                return entry
        return None


class Spec(Value):
    """The whole configuration. Without `process` a container can be created, but not started."""

    version: str
    root: Root | None = None
    process: Process | None = None
    hostname: str = ""
    domainname: str = ""
    mounts: tuple[Mount, ...] = ()
    hooks: Hooks = Hooks()
    annotations: Mapping[str, str] = {}
    linux: Linux = Linux()
