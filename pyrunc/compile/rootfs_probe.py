"""What the plan of a container needs to know of its files, looked up beneath its root before
anything runs.

Kinds of bind sources, destinations whose dangling links have to be followed by us, the mode of what
a tmpfs covers, the user's home; and who owns its stdio and its cgroup.
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc.compile.bind_source import bind_failed, look_at, open_source
from pyrunc.errors import KernelError
from pyrunc.kernel.path import open_in_root, read_in_root, resolve
from pyrunc.plan.model import Findings
from pyrunc.plan.mounts import may_be_opened_inside, normal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pyrunc.plan.bind_source import BindSource
    from pyrunc.spec.model import IdMap, Mount, Process, Spec

# Places that every image has as plain directories, or that lie in mounts of ours; others are looked
# at.
_PLAIN = frozenset(
    ("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup")
)
PASSWD_LIMIT_BYTES = 1 << 20
DEVICE_NAME = "device:"  # and the path: how descriptors of device files are called
KEEP_GROUPS = "run.oci.keep_original_groups"


def may_be_made_inside(mount: Mount, spec: Spec) -> bool:
    """Whether the container's process makes this bind itself, if its source
    `is_in_every_namespace`."""
    if spec.linux.namespace("mount") is None or spec.hooks.create_container:
        return False
    return may_be_opened_inside(mount, spec.linux)


def inside(spec: Spec, sources: Mapping[str, BindSource]) -> dict[int, tuple[str, bool]]:
    """Which binds the container's process makes itself: index of the mount -> its source's real
    path, and whether that is a directory.

    Links are followed here and never again: the process opens the real path and refuses to follow
    any, so that nobody can put something else there meanwhile. What is in `sources` was looked up
    by the caller, and is not looked at again. The ids of these mounts, by which they are listed,
    are in the order of the configuration.
    """
    made: dict[int, tuple[str, bool]] = {}
    for i, mount in enumerate(spec.mounts):
        if may_be_made_inside(mount, spec):
            source = sources.get(mount.source) or _look_up(mount)
            if source.is_in_every_namespace:
                made[i] = source.path, source.is_directory
    return made


def _look_up(mount: Mount) -> BindSource:
    number = open_source(mount.source, mount.destination, links=True)
    try:
        return look_at(number)
    except OSError as error:
        raise bind_failed(mount.source, mount.destination, error.errno or 0) from None
    finally:
        os.close(number)


def look(
    spec: Spec,
    descriptors: Mapping[str, int],
    nulls: tuple[int, ...],
    inside: Mapping[int, tuple[str, bool]],
    sources: Mapping[str, BindSource],
    pinned: Collection[str] = (),
    pivot: bool = True,
) -> Findings:
    """The findings. `descriptors` has the detached root and the trees of the other bind mounts by
    their plan names; `pinned` are the names of those, folders all, that come later. `nulls`: which
    of stdio are null devices. `sources`: what is known of binds' sources, whose storage may not
    answer a second time."""
    root = descriptors["root"]
    directories = {i: is_folder for i, (_, is_folder) in inside.items()}
    destinations = {}
    modes = {}
    for i, mount in enumerate(spec.mounts):
        tree = descriptors.get(f"tree:{i}")
        if f"tree:{i}" in pinned:
            directories[i] = True
        elif tree is not None and mount.source in sources:
            directories[i] = sources[mount.source].is_directory
        elif tree is not None:
            directories[i] = S_ISDIR(os.fstat(tree).st_mode)
        destination = normal(mount.destination)
        if destination in _PLAIN:
            continue
        there = _mode(root, destination)
        if there is None:
            real = resolve(root, destination)
            if real != destination:
                destinations[i] = real
        elif mount.type == "tmpfs" and S_ISDIR(there):
            modes[i] = there & 0o7777
    process = spec.process
    return Findings(
        directories,
        {i: path for i, (path, _) in inside.items()},
        destinations,
        modes,
        "" if process is None or has_home(process) else home(root, process.user.uid),
        _reopened(spec, nulls),
        {name[len(DEVICE_NAME) :]: name for name in descriptors if name.startswith(DEVICE_NAME)},
        () if pivot else whole_instances(),
    )


def _reopened(spec: Spec, nulls: tuple[int, ...]) -> tuple[int, ...]:
    """Which of stdio are null devices that the process opens again in the container, where a dump
    by CRIU finds them. In a user namespace /dev/null may be the host's, and without mounts it is:
    there they are replaced (`Launch.own_nulls`)."""
    linux, process = spec.linux, spec.process
    if (
        process is None
        or process.terminal
        or linux.namespace("mount") is None
        or linux.namespace("user")
    ):
        return ()
    return nulls


def whole_instances() -> tuple[str, ...]:
    """Where whole procfs and sysfs are mounted in our namespace, the last mounted first."""
    from pyrunc.kernel.mountinfo import mount_points

    found = [
        mount.path
        for mount in mount_points()
        if mount.root == "/" and mount.kind in ("proc", "sysfs")
    ]
    return tuple(reversed(found))


def has_home(process: Process) -> bool:
    """Whether the environment names a home, so that nobody has to look it up: of several the last
    counts."""
    last = next(
        (variable for variable in reversed(process.env) if variable.startswith("HOME=")), "HOME="
    )
    return last != "HOME="


def home(root: int, uid: int) -> str:
    """The user's home by the /etc/passwd beneath `root`, empty when that does not say. Our own
    parser: NSS would run the container's libraries."""
    try:
        content = read_in_root(root, "/etc/passwd", PASSWD_LIMIT_BYTES)
    except KernelError:
        return ""
    wanted = str(uid).encode()
    for line in content.splitlines():
        fields = line.split(b":")
        if len(fields) >= 6 and fields[2] == wanted:
            return os.fsdecode(fields[5]) if b"\0" not in fields[5] else ""
    return ""


def stdio_owner(spec: Spec) -> int | None:
    """Who, by an id of the host, is to own the container's pipes and files; None with a terminal."""
    process = spec.process
    if process is None or process.terminal:
        return None
    return host_id(process.user.uid, spec.linux.uid_mappings)


def cgroup_owner(spec: Spec) -> int | None:
    """Who, by an id of the host, is to own the cgroup: the container's user, when the container has
    a tree of its own to see it in and may write to that. None: it stays ours. Source: runtime-spec,
    config-linux.md, "Cgroup ownership"."""
    namespace = spec.linux.namespace("cgroup")
    shown = [mount for mount in spec.mounts if normal(mount.destination) == "/sys/fs/cgroup"]
    if spec.process is None or namespace is None or namespace.path or not shown:
        return None
    access = [option for option in shown[-1].options if option in ("ro", "rro", "rw")]
    if shown[-1].type not in ("cgroup", "cgroup2") or access[-1:] in (["ro"], ["rro"]):
        return None
    owner = host_id(spec.process.user.uid, spec.linux.uid_mappings)
    return owner if owner != os.geteuid() else None


def keeps_groups(spec: Spec) -> bool:
    """Whether the caller's groups stay: podman's `--group-add keep-groups`, a word of crun's."""
    return spec.annotations.get(KEEP_GROUPS) == "1"


def host_id(container_id: int, mappings: tuple[IdMap, ...]) -> int:
    """The id outside for one inside; unmapped ones stay."""
    for entry in mappings:
        if entry.container_id <= container_id < entry.container_id + entry.size:
            return entry.host_id + container_id - entry.container_id
    return container_id


def _mode(root: int, path: str) -> int | None:
    """st_mode of what is at the path beneath the root, None when nothing is."""
    try:
        number = open_in_root(root, path)
    except KernelError:
        return None
    try:
        return os.fstat(number).st_mode
    finally:
        os.close(number)
