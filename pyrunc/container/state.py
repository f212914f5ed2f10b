"""A container on disk: one folder per container under the root, and in it what another process
needs to act on it.

    <root>/<id>/config.json   the configuration as it was at create; later edits of the bundle have no effect
    <root>/<id>/state.json    this file's `State`: pid and start time of init, its cgroup, where it came from
    <root>/<id>/start.sock    listens until `start`; its presence is the status "created"

No status is stored: `status` derives it from the process, the freezer and the socket. The folder is
claimed by mkdir, so of two creates with one id exactly one wins; steps of different processes are
kept apart by flock(2) on the folder.

A folder is a container when its state.json names it. One without, which a killed create leaves, is
told from a foreign folder by the sticky bit that mkdir gave it: what is not ours is neither listed
nor deleted, whoever else keeps things in the root.
"""

from __future__ import annotations

import fcntl
import os
import time
from _stat import S_ISDIR, S_ISVTX

from pyrunc import atomic_file, jsontext
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import AlreadyExists, InvalidArgument, NotFound
from pyrunc.kernel.credential import in_user_namespace
from pyrunc.record_file import RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from pyrunc.cgroups.group import Cgroup

CONFIG, STATE, START_SOCKET = "config.json", "state.json", "start.sock"
NAME = "pyrunc"
DEFAULT_ROOT = f"/run/{NAME}"
FIRST = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+-")
FOLLOWING = FIRST | {"."}
LONGEST_ID = 255
CLAIMED = S_ISVTX | 0o700


def default_root() -> str:
    """`/run/pyrunc` for root, `$XDG_RUNTIME_DIR/pyrunc` for others. Raises InvalidArgument when
    that is not set.

    Root of a user namespace is one of the others, unless it says that it is called root.
    """
    root = os.geteuid() == 0
    if root and (os.environ.get("USER") == "root" or not in_user_namespace()):
        return DEFAULT_ROOT
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime and not root:
        raise InvalidArgument("XDG_RUNTIME_DIR is not set: give --root")
    return f"{runtime}/{NAME}" if runtime else DEFAULT_ROOT


def root_of(given: str | None) -> str:
    """The folder of all containers: an absolute path for `--root`, else the default. Raises
    InvalidArgument for `/`."""
    if given is None:
        return default_root()
    path = os.path.abspath(given)
    if not given or path == "/":
        raise InvalidArgument(f"--root {given!r} cannot hold containers")
    return path


def check_id(container_id: str) -> str:
    """The id, when it is one: safe as a file name and no option. Raises InvalidArgument."""
    good = (
        0 < len(container_id) <= LONGEST_ID
        and container_id[0] in FIRST
        and FOLLOWING.issuperset(container_id)
    )
    if not good:
        raise InvalidArgument(f"invalid container ID format: {container_id!r}")
    return container_id


class StateFile(RecordFile):
    """`state.json`: the fields of `State`. Of a pod's container a compiler makes it, and the shim
    adds the process that it has started, and when."""

    name = STATE
    id: str
    bundle: str = ""
    rootfs: str = ""
    oci_version: str = "1.0.0"
    annotations: dict[str, str] | None = None
    created: str = ""
    owner_uid: int = 0
    pid: int = 0
    start_time: int = 0
    private_pids: bool = True
    cgroup: dict[str, str] | None = None
    complete: bool = False
    keyring: str = ""
    started_at_ns: int | None = None


class State:
    """One container. `pid` 0: the create has not come that far (or was killed); `complete`: it has
    ended well.

    `created` is RFC 3339, UTC; `keyring` is the name of the session keyring that an exec joins,
    empty for none.
    """

    __slots__ = (
        "annotations",
        "bundle",
        "cgroup_record",
        "complete",
        "created",
        "folder",
        "id",
        "keyring",
        "oci_version",
        "owner_uid",
        "pid",
        "private_pids",
        "rootfs",
        "start_time",
    )

    def __init__(
        self,
        folder: str,
        container_id: str,
        *,
        bundle: str = "",
        rootfs: str = "",
        oci_version: str = "1.0.0",
        annotations: dict[str, str] | None = None,
        created: str = "",
        owner_uid: int = 0,
        pid: int = 0,
        start_time: int = 0,
        private_pids: bool = True,
        cgroup: dict[str, str] | None = None,
        complete: bool = False,
        keyring: str = "",
    ) -> None:
        self.folder = folder
        self.id = container_id
        self.bundle = bundle
        self.rootfs = rootfs
        self.oci_version, self.annotations, self.created = oci_version, annotations or {}, created
        self.owner_uid, self.pid, self.start_time = owner_uid, pid, start_time
        self.private_pids, self.cgroup_record = private_pids, cgroup
        self.complete, self.keyring = complete, keyring

    @property
    def start_socket(self) -> str:
        return f"{self.folder}/{START_SOCKET}"

    def cgroup(self) -> Cgroup | None:
        """The container's group; None when the create did not come that far."""
        if self.cgroup_record is None:
            return None
        from pyrunc.cgroups.group import Cgroup

        return Cgroup.from_record(self.cgroup_record)

    def config(self) -> dict[str, Any]:
        """The configuration at create, decoded. Raises NotFound when the create did not come that
        far."""
        try:
            with open(f"{self.folder}/{CONFIG}", "rb", buffering=0) as file:
                document = jsontext.loads(file.readall() or b"")
        except FileNotFoundError:
            raise NotFound(f"container {self.id} has no configuration") from None
        assert isinstance(document, dict)
        return document

    def save(self) -> None:
        """Write state.json whole."""
        self.record().write(self.folder)

    def record(self) -> StateFile:
        """What state.json holds."""
        return StateFile(
            id=self.id,
            bundle=self.bundle,
            rootfs=self.rootfs,
            oci_version=self.oci_version,
            annotations=self.annotations,
            created=self.created,
            owner_uid=self.owner_uid,
            pid=self.pid,
            start_time=self.start_time,
            private_pids=self.private_pids,
            cgroup=self.cgroup_record,
            complete=self.complete,
            keyring=self.keyring,
        )


def claim(root: str, container_id: str) -> str:
    """Make the container's folder, which takes the id. Raises AlreadyExists; the other container is
    not touched."""
    check_id(container_id)
    _make_root(root)
    folder = f"{root}/{container_id}"
    try:
        os.mkdir(folder, CLAIMED)
    except FileExistsError:
        if not _is_container(folder, container_id):
            raise AlreadyExists(f"{folder} exists and is not a container's") from None
        raise AlreadyExists(f"container with given ID already exists: {container_id}") from None
    return folder


def _make_root(root: str) -> None:
    """A user's own root is sticky: what cleans $XDG_RUNTIME_DIR of files that nobody used for hours
    leaves such ones alone (XDG Base Directory Specification). The default root may be passed: the
    CRI server's socket is in it."""
    if os.path.isdir(root):
        return
    os.makedirs(root, 0o711 if root == DEFAULT_ROOT else 0o700, exist_ok=True)
    if root == f"{os.environ.get('XDG_RUNTIME_DIR', '')}/{NAME}":
        os.chmod(root, 0o1700)


def find(root: str, container_id: str) -> State:
    """The container; one whose create was killed has pid 0. Raises NotFound, DamagedRecord."""
    check_id(container_id)
    folder = f"{root}/{container_id}"
    try:
        return _read(folder, container_id)
    except NotFound:
        if _is_claimed(folder):
            return State(folder, container_id, created=_time_of(folder))
        raise NotFound(f"container does not exist: {container_id}") from None


def _is_claimed(folder: str) -> bool:
    """Whether a create has made the folder, and come no further."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return False
    return S_ISDIR(found.st_mode) and bool(found.st_mode & S_ISVTX)


def _is_container(folder: str, container_id: str) -> bool:
    """As `find` sees it; a damaged record of the right name is a container's, so that it can be
    told of."""
    try:
        _read(folder, container_id)
    except NotFound:
        return _is_claimed(folder)
    except (DamagedRecord, ValueError):
        pass
    return True


def _read(folder: str, container_id: str) -> State:
    try:
        found = atomic_file.read_json(f"{folder}/{STATE}")
    except NotADirectoryError:
        raise NotFound(f"{folder} is not a folder") from None
    if found.get("id") != container_id:
        raise NotFound(f"{folder}/{STATE} is not the record of a container {container_id}")
    record = StateFile.of(found, DamagedRecord)
    return State(
        folder,
        container_id,
        bundle=record.bundle,
        rootfs=record.rootfs,
        oci_version=record.oci_version,
        annotations=record.annotations,
        created=record.created,
        owner_uid=record.owner_uid,
        pid=record.pid,
        start_time=record.start_time,
        private_pids=record.private_pids,
        cgroup=record.cgroup,
        complete=record.complete,
        keyring=record.keyring,
    )


def ids(root: str) -> list[str]:
    """The containers under a root, sorted; folders of others are none. Raises FileNotFoundError."""
    return sorted(
        entry.name
        for entry in os.scandir(root)
        if entry.name[0] in FIRST
        and FOLLOWING.issuperset(entry.name)
        and entry.is_dir(follow_symlinks=False)
        and _is_container(entry.path, entry.name)
    )


def remove(state: State) -> None:
    """Forget the container: its files and its folder. Idempotent."""
    _remove_folder(state.folder)


def _remove_folder(path: str) -> None:
    """Somebody else may be removing the same: a delete beside this one, an exec that keeps programs
    of its own."""
    try:
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                _remove_folder(entry.path)
            else:
                _unlink(entry.path)
        os.rmdir(path)
    except FileNotFoundError:
        pass


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


class Lock:
    """`with Lock(state):` one process at a time starts, changes or deletes the container. NotFound
    once it is gone."""

    __slots__ = ("_descriptor", "_state")

    def __init__(self, state: State) -> None:
        self._state, self._descriptor = state, -1

    @staticmethod
    def is_held(state: State) -> bool:
        """Whether another process holds it right now."""
        try:
            descriptor = os.open(state.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def __enter__(self) -> Lock:
        try:
            self._descriptor = os.open(
                self._state.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
        except FileNotFoundError:
            raise NotFound(f"container does not exist: {self._state.id}") from None
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def now() -> str:
    """The time as RFC 3339 with nanoseconds, UTC."""
    return _rfc3339(time.time_ns())


def _time_of(folder: str) -> str:
    return _rfc3339(os.stat(folder).st_mtime_ns)


def _rfc3339(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns:09d}Z"


def owner_name(uid: int) -> str:
    """The user's name in /etc/passwd, else the number. Read directly: NSS would load libraries."""
    try:
        with open("/etc/passwd", "rb", buffering=0) as file:
            for line in (file.readall() or b"").splitlines():
                fields = line.split(b":")
                if len(fields) > 2 and fields[2] == str(uid).encode():
                    return fields[0].decode("utf-8", "replace")
    except OSError:
        pass
    return str(uid)
