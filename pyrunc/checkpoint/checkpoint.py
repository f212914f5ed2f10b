"""`checkpoint`: CRIU writes the state of a container's processes to files. By default the container
then ends.

CRIU neither saves nor recreates external resources. The runtime names these to CRIU: bind mounts,
masked files, network and pid namespaces that have a path, and the host's files that the container
got as standard streams. The names of the standard streams are stored beside the images, so that
`restore` can replace pipes and files of the host with its own standard streams. Source:
https://criu.org/External_resources.
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from pyrunc import atomic_file, jsontext
from pyrunc.checkpoint import criu, criu_images
from pyrunc.container import status
from pyrunc.errors import InvalidArgument, KernelError, NotFound, PeerError, Unsupported
from pyrunc.kernel.credential import is_machine_root
from pyrunc.kernel.fd import closing_fd, read_file, stream_name
from pyrunc.kernel.path import clean, open_in_root, resolve
from pyrunc.plan.devices import DEFAULT
from pyrunc.plan.mounts import is_bind
from pyrunc.spec.parse import parse
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.checkpoint.criu import FieldList, Fields, FieldValue
    from pyrunc.container.state import State
    from pyrunc.spec.model import Linux, Spec

LOG = "dump.log"
LOG_LEVEL = 4
NULL = "/dev/null"  # the name of masked files in CRIU's list of external mounts
NETWORK_KEY, PID_KEY = "extRootNetNS", "extRootPidNS"
CLONE_NEWNET = 0x40000000


_FLAGS = {
    "tcp_established": criu.TCP_ESTABLISHED,
    "tcp_close": criu.TCP_CLOSE,
    "ext_unix_sk": criu.EXT_UNIX_SK,
    "shell_job": criu.SHELL_JOB,
    "file_locks": criu.FILE_LOCKS,
    "lazy_pages": criu.LAZY_PAGES,
    "link_remap": criu.LINK_REMAP,
    "auto_dedup": criu.AUTO_DEDUP,
}


class CriuOptions:
    """The options of CRIU that checkpoint and restore share. `values`: the options of the
    command line, by their keys.

    `image_path`, `work_path`: absolute paths of folders; an empty `work_path` means the container's
    state folder.
    """

    __slots__ = ("_cgroups_mode", "_empty_network", "_flags", "image_path", "work_path")

    def __init__(self, **values: object) -> None:
        self.image_path, self.work_path = str(values["image_path"]), str(values["work_path"])
        mode = str(values["manage_cgroups_mode"] or "soft")
        if mode not in criu.CGROUP_MODES:
            raise InvalidArgument(
                f"--manage-cgroups-mode {mode!r} is not one of {', '.join(criu.CGROUP_MODES)}"
            )
        if values["empty_ns"] and set(_words(values["empty_ns"])) != {"network"}:
            raise InvalidArgument("--empty-ns: only network can be left empty")
        self._cgroups_mode = criu.CGROUP_MODES[mode]
        self._empty_network = bool(values["empty_ns"])
        self._flags = [number for name, number in _FLAGS.items() if values.get(name)]

    def fields(self) -> FieldList:
        """Return the options as fields of CRIU's request, without the folders."""
        fields: FieldList = [(number, True) for number in self._flags]
        if self._empty_network:
            fields.append((criu.EMPTY_NS, CLONE_NEWNET))
        return [
            *fields,
            (criu.LOG_LEVEL, LOG_LEVEL),
            # Otherwise CRIU refuses mounts that are slaves of mounts of the host (a root that is a
            # slave).
            (criu.EXT_MASTERS, True),
            # A terminal's master is in the engine, outside of the container; CRIU makes a new one
            # and passes it to us.
            (criu.ORPHAN_PTS_MASTER, True),
            (criu.MANAGE_CGROUPS, True),
            (criu.MANAGE_CGROUPS_MODE, self._cgroups_mode),
        ]


class DumpOptions(Value):
    """Options for a dump only. `parent_path`: the folder of an earlier pre-dump, relative to the
    folder of images; `page_server`: ADDRESS:PORT."""

    leave_running: bool = False
    pre_dump: bool = False
    parent_path: str = ""
    page_server: str = ""
    status_fd: int | None = None
    tcp_skip_in_flight: bool = False

    def fields(self) -> FieldList:
        """Return the options as fields of CRIU's request. Raises InvalidArgument."""
        fields: FieldList = [(criu.LEAVE_RUNNING, True)] if self.leave_running else []
        if self.pre_dump:
            fields.append((criu.TRACK_MEM, True))
        if self.parent_path:
            fields += [(criu.PARENT_IMG, self.parent_path), (criu.TRACK_MEM, True)]
        if self.page_server:
            address, _, port = self.page_server.rpartition(":")
            if not address or not (port.isascii() and port.isdigit()):
                raise InvalidArgument("Use --page-server ADDRESS:PORT to specify page server")
            fields.append((criu.PAGE_SERVER, criu.message([(1, address), (2, int(port))])))
        if self.tcp_skip_in_flight:
            fields.append((criu.TCP_SKIP_IN_FLIGHT, True))
        return fields


def checkpoint(state: State, options: CriuOptions, dump: DumpOptions) -> None:
    """Dump the container, whose lock the caller holds. With `pre_dump` or `leave_running` the
    container runs on. Otherwise its processes have ended, and the caller deletes the container.

    Raises WrongState, Unsupported (rootless), InvalidArgument, NotFound (no criu), PeerError with
    the errors in CRIU's log.
    """
    if not is_machine_root():
        raise Unsupported("checkpoint needs root in the initial user namespace")
    status.require(
        state, (status.RUNNING, status.PAUSED), "Container cannot be checkpointed in {status} state"
    )
    images, work = open_folder(options.image_path), open_folder(options.work_path or state.folder)
    try:
        # A dump overwrites files by their names, as root: a link in the folder would lead it to a
        # file of the host.
        criu_images.check(images, options.image_path)
        criu_images.check_log(work, options.work_path or state.folder, LOG)
        _check_parent(images, dump.parent_path)
        # Before the dump, which ends the processes.
        streams = standard_streams(state)
        if not dump.pre_dump:
            atomic_file.write_bytes(
                f"{options.image_path}/{criu_images.DESCRIPTORS}", jsontext.dumps(streams).encode()
            )
        with criu.Criu({}) as session:
            session.request(
                criu.PRE_DUMP if dump.pre_dump else criu.DUMP,
                [
                    (criu.IMAGES_DIR_FD, images),
                    (criu.WORK_DIR_FD, work),
                    (criu.LOG_FILE, LOG),
                    (criu.PID, state.pid),
                    *([(criu.ROOT, state.rootfs)] if state.rootfs else []),
                    *([(criu.STATUS_FD, dump.status_fd)] if dump.status_fd is not None else []),
                    *options.fields(),
                    *dump.fields(),
                    *_freezer(state),
                    *configuration_file(state),
                    *_external_resources(state),
                    *(
                        (criu.EXTERNAL, name)
                        for name in dict.fromkeys(streams)
                        if name.startswith("file[")
                    ),
                ],
            )
    except PeerError as error:
        raise PeerError(
            f"{error.message}: {criu.errors_of(options.work_path or state.folder, LOG)}"
        ) from None
    finally:
        os.close(images)
        os.close(work)


def open_folder(path: str, *, make: bool = True) -> int:
    """Open the image folder or CRIU's work folder. With `make`, create a missing folder;
    otherwise raise NotFound."""
    if make:
        # Images hold the memory of the processes, with all their secrets.
        os.makedirs(path, 0o700, exist_ok=True)
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path!r} is not a folder") from None


def _check_parent(images: int, parent: str) -> None:
    if parent.startswith("/"):
        raise InvalidArgument("--parent-path must be relative to the folder of images")
    if parent:
        try:
            os.stat(parent, dir_fd=images)
        except FileNotFoundError:
            raise NotFound(
                f"--parent-path: {parent!r} does not exist relative to the folder of images"
            ) from None


def standard_streams(state: State) -> list[str]:
    """Return the names (`stream_name`) of the streams that the container got as descriptors 0 to 2.
    The name is "" for a terminal and for a file on one of the container's own mounts. CRIU finds
    such a file by its path."""
    # A shell redirects its own descriptors for a moment when it runs `echo > file`, so those of the
    # running process may not be the streams that it got. State files of earlier versions have no
    # streams.
    streams = state.streams
    if streams is None:
        streams = [stream_name(number, str(state.pid)) for number in range(3)]
    # Lines end with \n only: a path in mountinfo may have \r.
    lines = read_file(f"/proc/{state.pid}/mountinfo").split(b"\n")
    own = {f"file[{int(line.split(b' ', 1)[0]):x}:" for line in lines if line}
    return ["" if stream[: stream.find(":") + 1] in own else stream for stream in streams]


def configuration_file(state: State) -> Fields:
    """Return the option that names CRIU's configuration file: the file in the container's
    annotation, else the administrator's file. Returns no option if this file does not exist."""
    path = (state.annotations or {}).get("org.criu.config", "")
    for candidate in (path,) if path else ("/etc/criu/pyrunc.conf", "/etc/criu/runc.conf"):
        if os.path.exists(candidate):
            return [(criu.CONFIG_FILE, candidate)]
    return []


def _freezer(state: State) -> Fields:
    group = state.group()
    # Frozen processes cannot fork while CRIU collects them; with ptrace(2) alone CRIU may have to
    # try again and again.
    return [] if group is None else [(criu.FREEZE_CGROUP, group.directory)]


def _external_resources(state: State) -> Fields:
    """Return the options for the mounts and namespaces that CRIU must not save."""
    spec = parse(state.config())
    _refuse_mounts(spec)
    with closing_fd(
        os.open(f"/proc/{state.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    ) as root:
        binds = bind_mounts(spec, state.bundle, root)
        masked = masked_files(spec.linux, root)
    fields: FieldList = [external_mount(place, place) for place, _ in binds]
    # All get one name, so that a restore has to give a single /dev/null for them.
    fields += [external_mount(path, NULL) for path in masked]
    for kind, name, key in (("network", "net", NETWORK_KEY), ("pid", "pid", PID_KEY)):
        entry = spec.linux.namespace(kind)
        if entry is not None and entry.path:
            # CRIU names an external namespace by its inode, since its path on the host may differ
            # on another machine.
            inode = os.stat(f"/proc/{state.pid}/ns/{name}").st_ino
            fields.append((criu.EXTERNAL, f"{name}[{inode}]:{key}"))
    return fields


def external_mount(key: str, value: str) -> tuple[int, FieldValue]:
    """Return an external mount for CRIU's request. In a dump `key` is the mount point and `value` a
    name for it; in a restore `key` is that name and `value` the source on the host."""
    return criu.EXT_MNT, criu.message([(1, key), (2, value)])


def _refuse_mounts(spec: Spec) -> None:
    """Raise Unsupported for mounts that CRIU could neither save nor recreate."""
    for i, mount in enumerate(spec.mounts):
        if (
            mount.type == "overlay"
            or mount.uid_mappings
            or "idmap" in mount.options
            or "ridmap" in mount.options
        ):
            raise Unsupported(
                f"mounts[{i}]: an overlay or an id-mapped mount cannot be checkpointed"
            )


def mount_points(spec: Spec, root: int) -> list[str]:
    """Return the mount point of each mount in `spec.mounts`, as CRIU knows it: the destination,
    with symbolic links in the root resolved. `root`: a descriptor of the root, with or without
    these mounts. Raises KernelError."""
    places: list[str] = []
    for mount in spec.mounts:
        place = clean(mount.destination)
        # Inside another mount, links of the root have no effect.
        if not any(place.startswith(above + "/") for above in places):
            place = resolve(root, place)
        places.append(place)
    return places


def bind_mounts(spec: Spec, bundle: str, root: int) -> list[tuple[str, str]]:
    """Return (mount point, source) of each bind mount from the host. If the container has a user
    namespace, its device files are bind mounts, too. `root` and errors are those of
    `mount_points`."""
    sources = {
        place: os.path.join(bundle, mount.source)
        for place, mount in zip(mount_points(spec, root), spec.mounts, strict=True)
        if is_bind(mount)
    }
    # In a user namespace, device files are bind mounts of the host's, because mknod(2) is refused
    # (`plan.devices`).
    if spec.linux.namespace("user") is not None and clean("/dev") not in sources:
        listed = (device.path for device in spec.linux.devices)
        sources |= {path: path for path in (*(path for path, _, _ in DEFAULT), *map(clean, listed))}
    return list(sources.items())


def masked_files(linux: Linux, root: int) -> list[str]:
    """Return the masked paths over which the runtime has mounted /dev/null. These are the masked
    paths that exist and are not folders. Symbolic links are resolved. `root`: the descriptor of the
    process's root directory."""
    masked = []
    for path in dict.fromkeys(map(clean, linux.masked_paths)):
        try:
            place = resolve(root, path)
            descriptor = open_in_root(root, place)
        except KernelError:
            continue
        if not S_ISDIR(os.fstat(descriptor).st_mode):
            masked.append(place)
        os.close(descriptor)
    return masked


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple | list) else (str(value),)
