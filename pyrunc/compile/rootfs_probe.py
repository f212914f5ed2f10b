"""Collects facts about a container's files for its plan, before anything of the container runs.
Also determines the owners of the container's stdio and cgroup.

The facts: which bind sources are directories, targets of dangling links at mount points, modes of
folders that a tmpfs covers, and the user's home.
"""

from __future__ import annotations

import os
from errno import ENOENT
from stat import S_ISDIR

from pyrunc.compile.bind_source import bind_failed, describe_source, open_source
from pyrunc.errors import KernelError
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.path import (
    clean,
    open_beneath,
    open_in_root,
    read_in_root,
    read_regular,
    resolve,
)
from pyrunc.plan.model import RootfsFacts
from pyrunc.plan.mounts import may_be_opened_inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyrunc.compile.bind_source import BindSource
    from pyrunc.spec.model import IdMap, Mount, Process, Spec

# Folders that every image has as plain directories, or that lie in mounts of ours; others are
# probed.
_PLAIN = frozenset(
    ("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup")
)
PASSWD = "/etc/passwd"
# Mount point that covers the file -> the file's path in the mount; empty: the mount is the file.
PASSWD_BELOW = {"/": PASSWD, "/etc": "/passwd", PASSWD: ""}
PASSWD_LIMIT_BYTES = 1 << 20
DEVICE_NAME = "device:"  # DEVICE_NAME + path: the name of a device file's descriptor
KEEP_GROUPS = "run.oci.keep_original_groups"


def may_be_made_inside(mount: Mount, spec: Spec) -> bool:
    """Return whether the mount and `spec` let the container's process make this bind itself. The
    caller must check the source, too (`BindSource.is_in_every_namespace`)."""
    if spec.linux.namespace("mount") is None or spec.hooks.create_container:
        return False
    return may_be_opened_inside(mount, spec.linux)


def resolve_binds(
    spec: Spec, sources: Mapping[str, BindSource], in_root: Collection[int] = ()
) -> dict[int, tuple[str, bool]]:
    """Return the bind mounts that the container's process makes itself: index in the spec's mounts
    -> (real path of the source, whether the source is a directory).

    Symbolic links are followed only here. The process opens the real path and refuses links, so a
    path that is swapped meanwhile is an error. `sources`: facts about sources that the caller has
    looked up; these sources are not looked up again. `in_root`: indexes of mounts to leave out.
    """
    binds: dict[int, tuple[str, bool]] = {}
    for i, mount in enumerate(spec.mounts):
        # The process makes these itself, so that mounts get their ids in the order of the
        # configuration: clones of the caller would come before /proc in mountinfo.
        if i not in in_root and may_be_made_inside(mount, spec):
            source = sources.get(mount.source) or _look_up(mount)
            if source.is_in_every_namespace:
                binds[i] = source.path, source.is_directory
    return binds


def _look_up(mount: Mount) -> BindSource:
    with closing_fd(open_source(mount.source, mount.destination, links=True)) as number:
        try:
            return describe_source(number)
        except OSError as error:
            raise bind_failed(mount.source, mount.destination, error.errno or 0) from None


def probe(
    spec: Spec,
    descriptors: Mapping[str, int],
    nulls: tuple[int, ...],
    own_binds: Mapping[int, tuple[str, bool]],
    sources: Mapping[str, BindSource],
    pinned: Collection[str] = (),
    pivot: bool = True,
) -> RootfsFacts:
    """Collect the facts about the container's files that its plan needs.

    - `descriptors`: the detached root (`root`) and the detached bind mounts (`tree:INDEX`)
    - `nulls`: the numbers among 0 to 2 that are null devices
    - `own_binds`: the result of `resolve_binds`
    - `sources`: facts about bind sources that the caller has looked up; their storage is not
      accessed again
    - `pinned`: names (`tree:INDEX`) of bind mounts whose descriptors the launching process adds;
      all of them are directories
    - `pivot`: False if the root will be mounted over the host's root
    """
    root = descriptors["root"]
    directories = {i: is_folder for i, (_, is_folder) in own_binds.items()}
    destinations = {}
    modes = {}
    earlier: set[str] = set()
    for i, mount in enumerate(spec.mounts):
        tree = descriptors.get(f"tree:{i}")
        if f"tree:{i}" in pinned:
            directories[i] = True
        elif tree is not None and mount.source in sources:
            directories[i] = sources[mount.source].is_directory
        elif tree is not None:
            directories[i] = S_ISDIR(os.fstat(tree).st_mode)
        destination = clean(mount.destination)
        # Each probe is an openat2(2), fstat(2) and close(2); a default configuration has all seven
        # of these mounts. Below an earlier mount the root's files are hidden.
        if destination in _PLAIN or _is_covered(destination, earlier):
            earlier.add(destination)
            continue
        mode, real = _mode_and_path(root, destination)
        earlier |= {destination, real}
        if real != destination:
            destinations[i] = real
        elif mode is not None and mount.type == "tmpfs" and S_ISDIR(mode):
            modes[i] = mode & 0o7777
    process = spec.process
    return RootfsFacts(
        directories,
        {i: path for i, (path, _) in own_binds.items()},
        destinations,
        modes,
        ""
        if process is None or has_home(process.env)
        else _home_in(_read_passwd(spec, descriptors, own_binds, sources), process.user.uid),
        _reopened_nulls(spec, nulls),
        {name[len(DEVICE_NAME) :]: name for name in descriptors if name.startswith(DEVICE_NAME)},
        () if pivot else whole_instances(),
    )


def _reopened_nulls(spec: Spec, nulls: tuple[int, ...]) -> tuple[int, ...]:
    """Return the descriptors that the process must open again as the container's /dev/null, so that
    CRIU's dump finds the file: all of `nulls`, or none.

    The result is empty with a terminal, with a user namespace, and without a mount namespace. In
    the last two cases /dev/null may be the host's, so `Launch.own_nulls` replaces the descriptors.
    """
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
    """Return the mount points of complete procfs and sysfs mounts in our mount namespace, in
    reverse order of mounting. Bind mounts that show only a part of procfs or sysfs are left out."""
    from pyrunc.kernel.mountinfo import mount_points

    paths = [
        mount.path
        for mount in mount_points()
        if mount.root == "/" and mount.kind in ("proc", "sysfs")
    ]
    return tuple(reversed(paths))


def has_home(env: Sequence[str]) -> bool:
    """Return whether the environment sets HOME, and its last HOME is not empty."""
    last = next((variable for variable in reversed(env) if variable.startswith("HOME=")), "HOME=")
    return last != "HOME="


def home(root: int, uid: int) -> str:
    """Return the home of the user `uid` from /etc/passwd beneath `root`; empty if the file has
    none. NSS is not used, because it would run the container's libraries."""
    try:
        return _home_in(read_in_root(root, PASSWD, PASSWD_LIMIT_BYTES), uid)
    except KernelError:
        return ""


def _read_passwd(
    spec: Spec,
    descriptors: Mapping[str, int],
    own_binds: Mapping[int, tuple[str, bool]],
    sources: Mapping[str, BindSource],
) -> bytes:
    """Return the content of the container's /etc/passwd; empty if there is none. The file is in the
    last mount that covers it, else in the root. Mounts whose source is in `sources` are skipped."""
    try:
        for i, mount in reversed(tuple(enumerate(spec.mounts))):
            path = PASSWD_BELOW.get(clean(mount.destination))
            # The storage of known sources is not accessed (`probe`).
            if path is None or mount.source in sources:
                continue
            if i in own_binds:
                source = open_source(own_binds[i][0], mount.destination, links=False)
                with closing_fd(source):
                    return read_mounted_passwd(source, path)
            tree = descriptors.get(f"tree:{i}")
            return b"" if tree is None else read_mounted_passwd(tree, path)
        return read_in_root(descriptors["root"], PASSWD, PASSWD_LIMIT_BYTES)
    except KernelError:
        return b""


def read_mounted_passwd(mount: int, path: str) -> bytes:
    """Return the content of the file at `path` in a mount; links are resolved in the mount. If
    `path` is empty, the mount itself is the file. Raises KernelError, also for a file that is not
    regular or too large."""
    if path:
        return read_in_root(mount, path, PASSWD_LIMIT_BYTES)
    return read_regular(mount, PASSWD, PASSWD_LIMIT_BYTES)


def _home_in(passwd: bytes, uid: int) -> str:
    uid_field = str(uid).encode()
    for line in passwd.splitlines():
        fields = line.split(b":")
        if len(fields) >= 6 and fields[2] == uid_field:
            # The content is the image's: a NUL would end the variable in the middle.
            return os.fsdecode(fields[5]) if b"\0" not in fields[5] else ""
    return ""


def stdio_owner(process: Process | None, uid_mappings: tuple[IdMap, ...]) -> int | None:
    """Return the uid on the host that becomes the owner of the process's stdin, stdout and stderr:
    the uid of its user. None with a terminal, because the container itself gives its terminal to
    the user."""
    if process is None or process.terminal:
        return None
    return host_id(process.user.uid, uid_mappings)


def cgroup_owner(spec: Spec) -> int | None:
    """Return the uid on the host that will own the cgroup. None: the runtime's user stays the
    owner.

    The owner is the container's user if the container has its own cgroup namespace and mounts its
    cgroup tree writable (runtime-spec, config-linux.md, "Cgroup ownership").
    """
    namespace = spec.linux.namespace("cgroup")
    cgroup_mounts = [mount for mount in spec.mounts if clean(mount.destination) == "/sys/fs/cgroup"]
    if spec.process is None or namespace is None or namespace.path or not cgroup_mounts:
        return None
    access = [option for option in cgroup_mounts[-1].options if option in ("ro", "rro", "rw")]
    if cgroup_mounts[-1].type not in ("cgroup", "cgroup2") or access[-1:] in (["ro"], ["rro"]):
        return None
    owner = host_id(spec.process.user.uid, spec.linux.uid_mappings)
    return owner if owner != os.geteuid() else None


def keeps_groups(spec: Spec) -> bool:
    """Return whether the process keeps the caller's supplementary groups. podman requests this by
    an annotation of crun (`--group-add keep-groups`)."""
    return spec.annotations.get(KEEP_GROUPS) == "1"


def host_id(container_id: int, mappings: tuple[IdMap, ...]) -> int:
    """Convert an id of the container to an id of the host. An unmapped id is returned unchanged."""
    for entry in mappings:
        if entry.container_id <= container_id < entry.container_id + entry.size:
            return entry.host_id + container_id - entry.container_id
    return container_id


def _is_covered(path: str, mount_points: Collection[str]) -> bool:
    """Return whether `path` or a folder above it is a mount point."""
    while path not in mount_points and path != "/":
        path = path.rpartition("/")[0] or "/"
    return path in mount_points


def _mode_and_path(root: int, path: str) -> tuple[int | None, str]:
    """Return st_mode of the file at `path` beneath the root, and `path` itself. For a missing file
    return None, and `path` with its symbolic links resolved. Raises KernelError.

    `path` must be absolute and without `..`, as `clean` returns it.
    """
    try:
        number = open_beneath(root, path.lstrip("/") or ".")
    except KernelError as error:
        # ELOOP for a symbolic link, so no link precedes the missing name.
        if error.errno == ENOENT:
            return None, path
        return _mode_through_links(root, path)
    with closing_fd(number):
        return os.fstat(number).st_mode, path


def _mode_through_links(root: int, path: str) -> tuple[int | None, str]:
    """Return the result of `_mode_and_path` for a path with symbolic links."""
    try:
        number = open_in_root(root, path)
    except KernelError:
        # Perhaps a link whose target does not exist. A program of straight calls cannot follow it,
        # so its path is resolved here.
        return None, resolve(root, path)
    with closing_fd(number):
        return os.fstat(number).st_mode, path
