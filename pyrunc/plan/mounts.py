"""Plans the configuration's `mounts`: sorts the options of each mount into attributes, propagation
and options of the filesystem.

The options have the meaning of runtime-spec 1.3 config.md, as runc reads it: the last occurrence
wins, and a bind changes only the named attributes. Recursive options (`rro`) change the mount and
all mounts below it, after all other options of the mount.
"""

from __future__ import annotations

from pyrunc.abi import mount as abi
from pyrunc.errors import InvalidSpec
from pyrunc.kernel.path import clean
from pyrunc.plan.model import ChangeMount, LabelMount, MountFs, MountTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.plan.model import HostFacts, Op, RootfsFacts
    from pyrunc.spec.model import Linux, Mount

    Data = tuple[tuple[str, str | None], ...]

_RO = abi.MOUNT_ATTR_RDONLY
_ATIME = abi.MOUNT_ATTR__ATIME

# option -> (attributes set, attributes cleared). The atime family is an enumeration: setting one
# clears the field first.
ATTRIBUTES: dict[str, tuple[int, int]] = {
    "ro": (_RO, 0),
    "rw": (0, _RO),
    "nosuid": (abi.MOUNT_ATTR_NOSUID, 0),
    "suid": (0, abi.MOUNT_ATTR_NOSUID),
    "nodev": (abi.MOUNT_ATTR_NODEV, 0),
    "dev": (0, abi.MOUNT_ATTR_NODEV),
    "noexec": (abi.MOUNT_ATTR_NOEXEC, 0),
    "exec": (0, abi.MOUNT_ATTR_NOEXEC),
    "nosymfollow": (abi.MOUNT_ATTR_NOSYMFOLLOW, 0),
    "symfollow": (0, abi.MOUNT_ATTR_NOSYMFOLLOW),
    "noatime": (abi.MOUNT_ATTR_NOATIME, _ATIME),
    # An empty field means relatime, the kernel's default since 2.6.30 (mount(2)).
    "atime": (0, _ATIME),
    "relatime": (0, _ATIME),
    "norelatime": (abi.MOUNT_ATTR_STRICTATIME, _ATIME),
    "strictatime": (abi.MOUNT_ATTR_STRICTATIME, _ATIME),
    "nostrictatime": (0, _ATIME),
    "nodiratime": (abi.MOUNT_ATTR_NODIRATIME, 0),
    "diratime": (0, abi.MOUNT_ATTR_NODIRATIME),
}
# Flags of the superblock, which fsconfig takes; on a bind they would change the source, so they are
# left out.
SUPERBLOCK = ("sync", "dirsync", "lazytime", "mand", "iversion")
# Names of defaults, and `silent`, which only concerns the kernel's log (MS_SILENT, mount(2)).
# `is_remount` handles `remount`.
IGNORED = frozenset(
    (
        "notmpcopyup",
        "async",
        "nolazytime",
        "nomand",
        "noiversion",
        "silent",
        "loud",
        "defaults",
        "remount",
    )
)
PROPAGATION = {
    "shared": abi.MS_SHARED,
    "rshared": abi.MS_SHARED | abi.MS_REC,
    "slave": abi.MS_SLAVE,
    "rslave": abi.MS_SLAVE | abi.MS_REC,
    "private": abi.MS_PRIVATE,
    "rprivate": abi.MS_PRIVATE | abi.MS_REC,
    "unbindable": abi.MS_UNBINDABLE,
    "runbindable": abi.MS_UNBINDABLE | abi.MS_REC,
}
EXTENSIONS = ("tmpcopyup", "idmap", "ridmap")
UNLABELLED = ("proc", "sysfs", "mqueue", "cgroup2")  # refuse SELinux's context=
# Programs such as lxcfs may put their own files here; everything else inside /proc is refused
# (CVE-2019-16884).
PROC_FILES = frozenset(
    f"/proc/{name}"
    for name in (
        *("cpuinfo", "diskstats", "meminfo", "stat", "swaps", "uptime", "loadavg", "slabinfo"),
        "sys/kernel/ns_last_pid",
        "sys/crypto/fips_enabled",
    )
)


class MountOptions:
    """The options of one mount, sorted into attributes, propagation, options of the filesystem
    (`data`), and extensions (`tmpcopyup`, `idmap`, `ridmap`)."""

    __slots__ = (
        "bind",
        "clear",
        "data",
        "extensions",
        "propagation",
        "rclear",
        "recursive",
        "rset",
        "set",
    )

    def __init__(self, options: tuple[str, ...]) -> None:
        self.set = self.clear = self.rset = self.rclear = 0
        self.bind = self.recursive = False
        self.propagation: list[int] = []
        self.data: list[tuple[str, str | None]] = []
        self.extensions: list[str] = []
        for option in options:
            self._sort(option)

    def _sort(self, option: str) -> None:
        change = ATTRIBUTES.get(option)
        if change is not None:
            to_set, to_clear = change
            self.set = (self.set & ~to_clear) | to_set
            # A bit of the atime field stays in `clear` also when it is set: mount_setattr(2) wants
            # the whole field cleared.
            self.clear = (self.clear | to_clear) & ~(to_set & ~_ATIME)
        elif option in ("bind", "rbind"):
            self.bind, self.recursive = True, option == "rbind"
        elif option in PROPAGATION:
            self.propagation.append(PROPAGATION[option])
        elif option[:1] == "r" and option[1:] in ATTRIBUTES:
            to_set, to_clear = ATTRIBUTES[option[1:]]
            self.rset = (self.rset & ~to_clear) | to_set
            self.rclear = (self.rclear | to_clear) & ~(to_set & ~_ATIME)
        elif option in EXTENSIONS:
            self.extensions.append(option)
        elif option not in IGNORED and option:
            key, equals, value = option.partition("=")
            self.data.append((key, value if equals else None))


OPTIONS_AT_MOST = 256
_sorted_options: dict[tuple[str, ...], MountOptions] = {}


def _options(mount: Mount) -> MountOptions:
    """Return the mount's options, sorted into a `MountOptions`. The result is cached and shared, so
    the caller must not change it."""
    options = _sorted_options.get(mount.options)
    if options is None:
        if len(_sorted_options) >= OPTIONS_AT_MOST:
            _sorted_options.clear()
        options = _sorted_options[mount.options] = MountOptions(mount.options)
    return options


def operations(
    mount: Mount, index: int, linux: Linux, host: HostFacts, facts: RootfsFacts, warnings: list[str]
) -> tuple[Op, ...]:
    """Return the operations for `mounts[index]` of the configuration. Appends to `warnings`. Raises
    InvalidSpec.

    There is one operation for the mount. An mqueue takes no label as a mount option, so with
    `linux.mountLabel` a second operation sets its SELinux label.
    """
    options = _options(mount)
    path = f"mounts[{index}]"
    destination = clean(mount.destination)
    if destination == "/":
        raise InvalidSpec(f"{path}.destination", "the root cannot be mounted over")
    if is_remount(mount):
        # A change of the existing mount: as a new mount, a remounted tmpfs would be empty and cover
        # the old one.
        return (_plan_remount(options, destination, path),)
    _refuse_inside_proc(mount, destination, options.bind, path)
    if is_tree(mount):
        peer = _keeps_peers(options, linux)
        return (_plan_tree(mount, index, destination, facts, options, peer, warnings),)
    filesystem = _plan_filesystem(
        mount, destination, facts.modes.get(index), options, linux.mount_label, path
    )
    if filesystem.type == "cgroup2":
        filesystem = filesystem.replace(options=_cgroup_options(filesystem.options, linux, host))
    if linux.namespace("user") is not None or host.in_user_namespace:
        filesystem = filesystem.replace(fallback=_fallback_bind(filesystem.type, linux, host))
    if linux.mount_label and mount.type == "mqueue":
        return (filesystem, LabelMount(destination, linux.mount_label))
    return (filesystem,)


def finishing(mount: Mount) -> Op | None:
    """Return the operation that makes the mount read-only after the start has made files in it. A
    mount with the option `ro` needs it if its type is tmpfs or its destination is /dev. Return None
    for all other mounts, also for binds and remounts."""
    options = _options(mount)
    if not options.set & _RO or options.bind or is_remount(mount):
        return None
    destination = clean(mount.destination)
    return ChangeMount(destination, _RO) if mount.type == "tmpfs" or destination == "/dev" else None


def is_bind(mount: Mount) -> bool:
    return mount.type == "bind" or "bind" in mount.options or "rbind" in mount.options


def is_plain_bind(mount: Mount) -> bool:
    """Return whether the mount is a bind that is neither a remount nor id-mapped."""
    return (
        is_bind(mount)
        and not is_remount(mount)
        and not mount.uid_mappings
        and not _options(mount).extensions
    )


def is_tree(mount: Mount) -> bool:
    """Return whether the compiler can prepare the mount as a detached mount: a bind, an overlay, or
    a tmpfs that begins with a copy of the folder that it covers."""
    return (mount.type == "overlay" or is_bind(mount) or copies_up(mount)) and not is_remount(mount)


def is_remount(mount: Mount) -> bool:
    """Return whether this entry of `mounts` only changes an existing mount."""
    return "remount" in mount.options


def copies_up(mount: Mount) -> bool:
    """Return whether the mount is a tmpfs that begins with a copy of the folder that it covers."""
    return mount.type == "tmpfs" and "tmpcopyup" in mount.options


def _refuse_inside_proc(mount: Mount, destination: str, bind: bool, path: str) -> None:
    if destination == "/proc":
        if not bind and mount.type != "proc":
            raise InvalidSpec(
                path, f"{destination} cannot be mounted because it is not of type proc"
            )
    elif destination.startswith("/proc/") and destination not in PROC_FILES:
        raise InvalidSpec(path, f"{destination} cannot be mounted because it is inside /proc")


def _plan_tree(
    mount: Mount,
    index: int,
    destination: str,
    facts: RootfsFacts,
    options: MountOptions,
    peer: bool,
    warnings: list[str],
) -> Op:
    # mount(2) ignores a bind's data; an error would refuse configurations that runc takes.
    if options.data and is_bind(mount):
        texts = (key if value is None else f"{key}={value}" for key, value in options.data)
        warnings.append(
            f"mounts[{index}]: a bind mount takes no filesystem options:"
            f" {','.join(texts)} is ignored"
        )
    own_source = facts.root_sources.get(index) or facts.sources.get(index)
    return MountTree(
        destination,
        "" if own_source else f"tree:{index}",
        own_source or (mount.source if is_bind(mount) else mount.type),
        facts.directories.get(index, True),
        # A tmpfs becomes read-only late (`finishing`), because mount points may be made in it.
        options.set & ~_RO if mount.type == "tmpfs" else options.set,
        options.clear,
        options.rset,
        options.rclear,
        peer,
        tuple(options.propagation),
        options.recursive,
        index in facts.root_sources,
    )


def _plan_remount(options: MountOptions, destination: str, path: str) -> Op:
    if options.data or options.propagation or options.rset or options.rclear or options.extensions:
        raise InvalidSpec(f"{path}.options", "a remount changes the mount's own flags only")
    return ChangeMount(destination, options.set, options.clear)


def _keeps_peers(options: MountOptions, linux: Linux) -> bool:
    """Return whether mounts below this mount propagate both ways between host and container. They
    do if the mount and the root are both shared.

    If only the mount is shared, it is a slave of the host's mount and shared within the container
    only, as under runc.
    """
    shared = any(flags & abi.MS_SHARED for flags in options.propagation)
    return shared and linux.rootfs_propagation in ("shared", "rshared")


def may_be_opened_inside(mount: Mount, linux: Linux) -> bool:
    """Return whether the container's process can clone the source of a bind itself, in its copy of
    the runtime's mounts. False in these cases:

    - the mount is not a plain bind of a path: a remount, id-mapped, or with `tmpcopyup`
    - the container has a user namespace: the path may be out of reach, and the kernel locks the
      copied mounts
    - the mount must be a peer of the host's mount, but mounts of the copy are slaves
    - the mount must be a slave of the host's mount, but the mounts of the copy are private
    - the source is in /proc, where `self` would be the container's process
    """
    options, source = _options(mount), mount.source
    private_copy = linux.rootfs_propagation in ("private", "rprivate")
    return (
        is_plain_bind(mount)
        and source.startswith("/")
        and not source.startswith("/proc/")
        and not _keeps_peers(options, linux)
        and not (private_copy and any(flags & abi.MS_SLAVE for flags in options.propagation))
        and linux.namespace("user") is None
    )


def _plan_filesystem(
    mount: Mount, destination: str, mode: int | None, options: MountOptions, label: str, path: str
) -> MountFs:
    # Engines write the type "cgroup" for both versions, and runc mounts what the host has.
    kind = "cgroup2" if mount.type == "cgroup" else mount.type
    data = [(word, None) for word in SUPERBLOCK if word in mount.options] + [
        (key, value) for key, value in options.data if key not in SUPERBLOCK
    ]
    if options.extensions:
        raise InvalidSpec(
            f"{path}.options", f"{options.extensions[0]} is not supported on a {kind} mount"
        )
    # These become read-only only after devices, links and mount points are made in them
    # (`finishing`).
    late = options.set & _RO and (kind == "tmpfs" or destination == "/dev")
    # As in runc, a tmpfs keeps the mode of the folder that it covers.
    if kind == "tmpfs" and mode is not None and not any(key == "mode" for key, _ in data):
        data.insert(0, ("mode", f"{mode:o}"))
    if label and kind not in UNLABELLED:
        data.append(("context", label))
    return MountFs(
        destination,
        kind,
        mount.source or kind,
        tuple(data),
        options.set & ~_RO if late else options.set,
        # Strict: with a link as /proc, an image could have procfs mounted elsewhere and put a file
        # tree in its place (CVE-2019-19921).
        kind in ("proc", "sysfs"),
        tuple(options.propagation),
        options.rset,
        options.rclear,
    )


def _cgroup_options(options: Data, linux: Linux, host: HostFacts) -> Data:
    """Return a cgroup2 mount's options. Without a new cgroup namespace, add the options of the
    host's mount.

    Without that namespace the container mounts the host's superblock, and the options of the new
    mount replace those of the host's mount (Linux, cgroup_get_tree, apply_cgroup_root_flags): the
    host would lose `nsdelegate` and `memory_recursiveprot`.
    """
    namespace = linux.namespace("cgroup")
    if namespace is not None and not namespace.path:
        return options
    names = [key for key, _ in options]
    return (*options, *((word, None) for word in host.cgroup_options if word not in names))


def _fallback_bind(kind: str, linux: Linux, host: HostFacts) -> str:
    """Return the host's path to bind if the kernel refuses a new mount of type `kind`. Empty if the
    kernel cannot refuse it.

    A user namespace may mount sysfs only in a network namespace that it owns, and cgroup2 only in a
    cgroup namespace that it owns. A namespace that the container joins may have another owner.
    """
    owner, place = {"sysfs": ("network", "/sys"), "cgroup2": ("cgroup", host.cgroup_root)}.get(
        kind, ("", "")
    )
    entry = linux.namespace(owner)
    # runc does so for cgroup2, crun for sysfs.
    return place if entry is None or entry.path else ""
