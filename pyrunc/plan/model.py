"""Defines the operations of a new process (`Op`) and the steps of its parent (`ParentStep`).

A plan is a tuple of operations, in order. The parent's steps belong to the operation at which the
process waits for its parent: `Sync`, or a `LoadFilter` with a listener. The parent carries out the
steps in order; then the process goes on. `show` has a text for each class, `lower` the system calls
of each operation, and `launch.steps` the code of each step; a test checks that no class is missing
there.

Operations refer to descriptors by name (`root`, `cgroup`, `tree:3`, `namespace:network`); the
descriptors are opened before the launch. Paths of the container are absolute and are resolved
beneath its root when the operation runs.
"""

from __future__ import annotations

from pyrunc.abi.capability import CAPABILITIES
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pyrunc.spec.model import ConsoleSize, Hook, IdMap, Rlimit


class Op(Value):
    """One operation of a plan. The launcher carries out the operations up to `Clone`; the process
    that it clones carries out the later ones."""


class ParentStep(Value):
    """One step of the parent while the new process waits (`launch.steps.perform`)."""


# In the runtime, as a parent


class WriteIdMaps(ParentStep):
    """Write gid_map and uid_map of the new user namespace (user_namespaces(7))."""

    uids: tuple[IdMap, ...]
    gids: tuple[IdMap, ...]


class RecordProcess(ParentStep):
    """Store pid and start time of the process in the container's state. If the runtime is killed
    during `create`, `delete` then finds the process."""


class GiveCgroup(ParentStep):
    """Make `uid` the owner of the cgroup's directory and of the files that
    /sys/kernel/cgroup/delegate lists (runtime-spec, "Cgroup ownership")."""

    uid: int


class EnterRdt(ParentStep):
    """Put the container's first process into its resctrl group (RDT), which is made if it is
    missing."""

    rdt: Mapping[str, Any]


class JoinRdt(ParentStep):
    """Put the process of an exec into the container's resctrl group (RDT), which exists already."""

    rdt: Mapping[str, Any]


class MoveLinks(ParentStep):
    """Move network devices into the process's network namespace, with their addresses. `links`:
    name in the runtime's namespace -> name in the container's."""

    links: Mapping[str, str]


class WriteHookState(ParentStep):
    """Write the container's state into the memfd that startContainer hooks get as stdin."""

    descriptor: str


class RunHooks(ParentStep):
    """Run all hooks of one kind, one after the other. By default they run in the runtime's
    namespaces.

    `folder`: if not empty, the hooks run in these `namespaces` of the process, with `folder` as
    their working directory.
    """

    kind: str
    hooks: tuple[Hook, ...]
    folder: str = ""
    namespaces: tuple[str, ...] = ()


class SetLimits(ParentStep):
    """Set resource limits of a process in a user namespace (prlimit(2)), because the process itself
    may not raise them."""

    limits: tuple[Rlimit, ...]


class ClearOnlcr(ParentStep):
    """Stop the terminal from turning a newline into two characters (ONLCR, termios(3)), because
    the caller's terminal does so already."""


class SendListener(ParentStep):
    """Send the seccomp listener to the agent's unix socket (runtime-spec, "The Container Process
    State")."""

    path: str
    metadata: str = ""


# In the launcher, still in the runtime's namespaces


class Prepare(Op):
    """Name the process, reset the signals 32 and 33, which posix_spawn leaves ignored, and make the
    process non-dumpable."""

    name: str = "pyrunc:init"


class SetOomScore(Op):
    """Write oom_score_adj; children inherit it."""

    value: int


class SetExecLabel(Op):
    """Set the LSM label that the process gets at its next execve. `module`: `apparmor` or
    `selinux`."""

    module: str
    label: str


class Join(Op):
    """Enter the namespace of type `kind` behind a descriptor."""

    kind: str
    descriptor: str


class JoinProcess(Op):
    """Enter the namespaces `kinds` of a process with one setns(2). `descriptor`: the name of its
    pidfd."""

    kinds: tuple[str, ...]
    descriptor: str


class OffsetClocks(Op):
    """Make a new time namespace for children, with offsets (clock -> seconds, nanoseconds)."""

    offsets: tuple[tuple[str, int, int], ...]


class SetAffinity(Op):
    """Restrict the process to these CPUs; empty: allow all."""

    cpus: tuple[int, ...] = ()


class Clone(Op):
    """Clone the container's process as a child of the runtime, in new namespaces of these `kinds`.
    `cgroup`: the process begins in the container's cgroup (CLONE_INTO_CGROUP)."""

    kinds: tuple[str, ...]
    cgroup: bool


# In the container's process


class Sync(Op):
    """Report that the process has reached `point`, and wait until the parent has carried out its
    `steps`."""

    point: str
    steps: tuple[ParentStep, ...] = ()


class BecomeRoot(Op):
    """Set the uid and the gid to 0 in the user namespace."""


class NewSession(Op):
    """Make the process the leader of a new session without a terminal."""


class NewKeyring(Op):
    """Join the session keyring `name`, which is made if it is missing. So the process cannot reach
    the caller's keys."""

    name: str
    in_user_namespace: bool = False


class LoopbackUp(Op):
    """Bring up the network interface `lo`."""


class SetPropagation(Op):
    """Set the propagation of `/` in the new mount namespace, which is a copy of the runtime's.

    `flags`: MS_* flags. MS_REC sets the propagation of the mounts below `/` as well.
    """

    flags: int


class AttachRoot(Op):
    """Attach the detached root mount in the container's mount namespace.

    - `propagation`: MS_* flags for the mount
    - `place`: `/` or, if there are createContainer hooks, a folder in which the hooks find the root
    """

    propagation: int
    place: str = "/"


class AttachEmptyRoot(Op):
    """Mount a tmpfs as the root of a pod's pause process. It is read-only and contains only the
    directories `folders`."""

    folders: tuple[str, ...]


class AttachMount(Op):
    """Attach a detached mount at the folder `path` of the process's root. It is not cloned."""

    path: str
    descriptor: str


class MountFs(Op):
    """Mount a new instance of a filesystem.

    - `options`: the filesystem's options as (key, value), with the value None for a flag
    - `attributes`: MOUNT_ATTR_*
    - `strict`: the destination must be an ordinary directory, never a symlink (procfs, sysfs)
    - `fallback`: path of the host's mount that is bound instead, as a slave, if the kernel refuses
      a new instance. The kernel refuses sysfs in a user namespace that does not own the network
      namespace, and cgroup2 in one that does not own the cgroup namespace.
    """

    destination: str
    type: str
    source: str
    options: tuple[tuple[str, str | None], ...] = ()
    attributes: int = 0
    strict: bool = False
    propagation: tuple[int, ...] = ()
    recursive_set: int = 0
    recursive_clear: int = 0
    fallback: str = ""


LINK_CAME = "there was no link in the path when it was looked up"


class MountTree(Op):
    """Attach a detached clone of a host mount (a bind) at `destination`.

    - `descriptor`: the name of the clone that the runtime has made. Empty: the container's process
      clones `source`.
    - `source`: a path in the process's copy of the runtime's mounts. A symbolic link in it is an
      error, because the path is already resolved.
    - `recursive`: clone the mounts below `source` as well
    - `directory`: the source is a directory
    - `set`, `clear`: MOUNT_ATTR_* for this mount
    - `recursive_set`, `recursive_clear`: MOUNT_ATTR_* for this mount and the mounts below it
    - `propagation`: MS_* flags
    - `in_root`: `source` is a path in the container's root instead. The process resolves it after
      the earlier mounts, and itself finds out whether it is a directory; `directory` is ignored.
      Symbolic links cannot lead out of the root.
    """

    destination: str
    descriptor: str
    source: str
    directory: bool
    set: int = 0
    clear: int = 0
    recursive_set: int = 0
    recursive_clear: int = 0
    peer: bool = False
    propagation: tuple[int, ...] = ()
    recursive: bool = True
    in_root: bool = False


class MakeDevice(Op):
    """Make a device file with this owner and mode. An existing file must be the same device.

    - `fresh`: the directory is new, so an existing file is an error
    - `bind`: where mknod(2) is refused (EPERM), bind-mount the host's device
    """

    path: str
    type: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    fresh: bool = False
    bind: bool = True


class AttachDevice(Op):
    """Attach the detached mount of a device file at the device's path. The runtime has made the
    file, because the process may not make devices in the container's user namespace."""

    device: MakeDevice
    descriptor: str


class Symlink(Op):
    """Make a symbolic link in the container. `over`: replace an existing file; otherwise an
    existing file stays."""

    path: str
    target: str
    over: bool = False


class PivotRoot(Op):
    """Turn the attached root into `/` (pivot_root(2)), and detach the old root."""


class CoverRoot(Op):
    """Mount the container's root over `/` instead of calling pivot_root, because pivot_root fails
    where the host's root is a ramdisk. The host's root stays mounted below it.

    - `move`: the container's root is mounted elsewhere, and is moved onto `/` first
    - `hide`: the mount points, in the host's root, of procfs and sysfs mounts that mask no files.
      They are hidden, because the container could read there the files that its own mounts mask.
    """

    move: bool
    hide: tuple[str, ...]


class ShareRoot(Op):
    """Set the root's mount propagation. Comes after all bind mounts whose source is in the root,
    because an unbindable mount cannot be cloned."""

    propagation: int


class ChangeRoot(Op):
    """Change the root by chroot, for a container without a new mount namespace."""


class LabelMount(Op):
    """Set the SELinux label of the root directory of the filesystem mounted at `path`, for a
    filesystem that takes no label as a mount option."""

    path: str
    label: str


class ReopenNull(Op):
    """Replace each of stdin, stdout and stderr that is the host's /dev/null by the container's
    /dev/null, which must be the device 1:3."""

    descriptors: tuple[int, ...]


class MakeFolder(Op):
    """Make a directory and its missing parents."""

    path: str


class OpenTerminal(Op):
    """Open a terminal in the container's devpts: send the master to the parent, and use the slave
    as stdio.

    - `console`: attach the slave at /dev/console, too
    - `of_host`: use the devpts of the host, for a container without a new mount namespace
    """

    size: ConsoleSize | None
    uid: int
    console: bool
    of_host: bool = False


class ChangeMount(Op):
    """Set and clear MOUNT_ATTR_* of the mount at `path`."""

    path: str
    set: int
    clear: int = 0


class SetUmask(Op):
    mask: int


class SetHostname(Op):
    name: str


class SetDomainname(Op):
    name: str


class SetSysctl(Op):
    """Write `value` to `path` below /proc/sys, through a private procfs."""

    path: str
    value: str


class ReadonlyPath(Op):
    """Bind-mount the path on itself, read-only. A missing path is skipped."""

    path: str


class MaskPath(Op):
    """Hide a directory behind an empty read-only tmpfs, anything else behind /dev/null. A missing
    path is skipped.

    `copy`: hide all directories behind clones of one tmpfs. False if the kernel cannot clone
    detached mounts: each directory gets its own tmpfs.
    """

    path: str
    copy: bool = True


class SetScheduler(Op):
    """Call sched_setattr(2); the times are nanoseconds."""

    policy: str
    flags: int
    nice: int
    priority: int
    runtime: int
    deadline: int
    period: int


class SetIoPriority(Op):
    klass: str
    priority: int


class SetPersonality(Op):
    domain: int


class SetMemoryPolicy(Op):
    mode: str
    flags: int
    nodes: tuple[int, ...]


class SetLimit(Op):
    type: str
    soft: int
    hard: int


class DropBounding(Op):
    """Drop all capabilities but `keep` (numbers) from the bounding set. `last`: the number
    of the kernel's last capability."""

    keep: tuple[int, ...]
    last: int


class SetGroups(Op):
    groups: tuple[int, ...]


class SetIds(Op):
    """Set all uids and gids. `keep`: keep the permitted capabilities over the change."""

    uid: int
    gid: int
    keep: bool


class SetCapabilities(Op):
    """Set the capability sets, which are bit masks. The `ambient` capabilities are numbers and are
    raised one by one; those that the kernel refuses are skipped."""

    effective: int
    permitted: int
    inheritable: int
    ambient: tuple[int, ...]


class ForbidNewPrivileges(Op):
    """Set PR_SET_NO_NEW_PRIVS."""


class TryFolder(Op):
    """Change the working directory with root's rights, before a filter can forbid it. If that is
    not permitted, `EnterFolder` tries again later with the user's rights.

    The directory must be below the root (CVE-2024-21626).
    """

    path: str


class EnterFolder(Op):
    """Change the working directory with the user's rights, if `TryFolder` was refused. The
    directory must be below the root."""

    path: str


class LoadFilter(Op):
    """Load a seccomp filter. `instructions`: sock_filter bytes.

    `listener`: the kernel also makes a notification descriptor. The process then waits until the
    parent has fetched this descriptor and carried out `steps`.
    """

    instructions: bytes
    flags: int
    listener: bool = False
    steps: tuple[ParentStep, ...] = ()


class CheckProgram(Op):
    """Check that the command can be executed, so that the caller of `create` gets the error, not
    the caller of `start`."""

    args: tuple[str, ...]
    env: tuple[str, ...]


class Ready(Op):
    """Report to the parent that the process is ready to wait for `start` or to execute its
    command."""


class EndBySignals(Op):
    """Make these signals end the process as long as it has not executed its command. Otherwise the
    kernel would drop them, because the process is the first of its pid namespace."""

    numbers: tuple[int, ...]


class AwaitStart(Op):
    """Wait until `start` connects to the start socket and sends one byte. Later failures are sent
    over this connection."""

    descriptor: str


class RefuseStart(Op):
    """Report to `start` that there is no command to execute, and exit."""


class RunHook(Op):
    """Run a startContainer hook in a child process. A hook that fails ends the container's process.
    The failure, with the beginning of the hook's stderr, is reported to `start` or, in a plan
    without `start`, to the parent.

    - `descriptor`: name of the descriptor that becomes the hook's stdin, with the container's state
    - `errors`: name of the descriptor that becomes the hook's stderr
    """

    index: int
    path: str
    args: tuple[str, ...]
    env: tuple[str, ...]
    timeout_s: int | None
    descriptor: str
    errors: str


class Execute(Op):
    """Close all descriptors but stdio and the next `preserve` ones. Then execute the command
    `args[0]`, which is looked up in PATH of `env`."""

    args: tuple[str, ...]
    env: tuple[str, ...]
    preserve: int = 0


class ExecuteDescriptor(Op):
    """Execute the file behind a descriptor: `pause` in a pod's pause process."""

    descriptor: str
    args: tuple[str, ...]
    env: tuple[str, ...]


def steps_of(op: Op) -> tuple[ParentStep, ...]:
    """Return the parent's steps while the process waits at this operation."""
    return op.steps if isinstance(op, _WITH_STEPS) else ()


_WITH_STEPS = (Sync, LoadFilter)


class HostFacts(Value):
    """Facts on which a plan depends, about the machine and the runtime's own process.

    - `capabilities`: bit mask of those that the runtime can pass on to a process
    - `oom_score_adj`: the runtime's own value; its children cannot have a lower one unless
      `lowers_oom_score`
    - `clones_detached`: open_tree(2) can clone a detached mount
    - `affinity_restricted`: the runtime's CPU affinity excludes some CPUs
    - `in_user_namespace`: the runtime is not in the initial user namespace
    - `setgroups`: the runtime's user namespace permits setgroups(2)
    - `cgroup_root`: the mount point of the cgroup v2 tree
    - `cgroup_options`: the tree's superblock options, such as `nsdelegate`
    """

    capabilities: int
    last_capability: int
    oom_score_adj: int = 0
    apparmor: bool = False
    selinux: bool = False
    kcore: bool = True
    clones_detached: bool = True
    affinity_restricted: bool = False
    in_user_namespace: bool = False
    setgroups: bool = True
    cgroup_root: str = "/sys/fs/cgroup"
    cgroup_options: tuple[str, ...] = ()

    @property
    def lowers_oom_score(self) -> bool:
        """Return whether we may lower oom_score_adj. CAP_SYS_RESOURCE permits it in the initial
        user namespace only (proc_pid_oom_score_adj(5))."""
        return not self.in_user_namespace and bool(
            self.capabilities >> CAPABILITIES["CAP_SYS_RESOURCE"] & 1
        )


class RootfsFacts(Value):
    """Facts on which a container's plan depends, about the container's files.

    By index of `spec.mounts`:
    - `directories`: whether the mount's source is a directory
    - `sources`: absolute paths of the binds that the container's process clones itself; the other
      binds come as descriptors
    - `root_sources`: for each bind with `in_root` (`MountTree`), the source's path in the
      container's root
    - `destinations`: real paths of destinations that are links to missing files
    - `modes`: the modes of directories that a tmpfs covers

    Others:
    - `home`: home directory of the process's user, for an environment without HOME
    - `null_stdio`: the numbers among 0 to 2 that `ReopenNull` replaces by the container's /dev/null
    - `devices`: path of a device file for `AttachDevice` -> name of its descriptor
    - `instances`: the paths that `CoverRoot` hides; empty for a start without `CoverRoot`
    """

    directories: Mapping[int, bool] = {}
    sources: Mapping[int, str] = {}
    destinations: Mapping[int, str] = {}
    modes: Mapping[int, int] = {}
    home: str = ""
    null_stdio: tuple[int, ...] = ()
    devices: Mapping[str, str] = {}
    instances: tuple[str, ...] = ()
    root_sources: Mapping[int, str] = {}


class Plan(Value):
    """The operations in order, and a warning for each setting of the configuration that is left
    out."""

    ops: tuple[Op, ...]
    warnings: tuple[str, ...] = ()
