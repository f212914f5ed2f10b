"""The state of containers on disk, which all commands share. Each container has a folder below a
root:

    <root>/<id>/config.json   the configuration at create; later edits of the bundle have no effect
    <root>/<id>/state.json    this file's `State`: init's pid and start time, cgroup, bundle
    <root>/<id>/start.sock    listens until `start`; while it exists the status is "created"

No status is stored: `status` derives it from the process, the freezer and the socket. mkdir claims
the folder, so of two creates with one id exactly one succeeds. Commands exclude each other by
flock(2) on the folder.

A folder is a container if the id in its state.json is the folder's name. If create was killed,
state.json may be missing; the folder is then recognised by the sticky bit that create's mkdir sets.
Other folders under the root are neither listed nor deleted.
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
from pyrunc.kernel.fd import closing_fd, read_file
from pyrunc.records import RecordFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.ipc import Message
    from pyrunc.spec.model import Spec

CONFIG, STATE, START_SOCKET = "config.json", "state.json", "start.sock"
NAME = "pyrunc"
DEFAULT_ROOT = f"/run/{NAME}"
FIRST = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+-")
FOLLOWING = FIRST | {"."}
# NAME_MAX: the id is a folder's name.
LONGEST_ID = 255
# The sticky bit marks the folder as a container's before state.json exists; with mode 0700 it has
# no other effect.
CLAIMED = S_ISVTX | 0o700


def default_root() -> str:
    """Return the folder of all containers for a command line without --root:

    - `/run/pyrunc` for root. For root of a user namespace only if $USER is root or XDG_RUNTIME_DIR
      is not set.
    - `$XDG_RUNTIME_DIR/pyrunc` in all other cases. Raises InvalidArgument if the variable is not
      set.
    """
    root = os.geteuid() == 0
    # As in runc (shouldHonorXDGRuntimeDir). podman passes its environment to create, but to start
    # only two variables, without USER. So if USER is not set, root of a user namespace counts as an
    # ordinary user.
    if root and (os.environ.get("USER") == "root" or not in_user_namespace()):
        return DEFAULT_ROOT
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime and not root:
        raise InvalidArgument("XDG_RUNTIME_DIR is not set: pass --root")
    return f"{runtime}/{NAME}" if runtime else DEFAULT_ROOT


def root_of(option: str | None) -> str:
    """Return the folder of all containers. `option`: the value of --root, or None for
    `default_root`. Raises InvalidArgument for `/`."""
    if option is None:
        return default_root()
    path = os.path.abspath(option)
    if not option or path == "/":
        raise InvalidArgument(f"--root {option!r} must be a folder other than /")
    return path


def check_id(container_id: str) -> str:
    """Return the id if it is valid: safe as a file name, and not like an option. Raises
    InvalidArgument."""
    is_valid = (
        0 < len(container_id) <= LONGEST_ID
        and container_id[0] in FIRST
        and FOLLOWING.issuperset(container_id)
    )
    if not is_valid:
        raise InvalidArgument(f"invalid container ID format: {container_id!r}")
    return container_id


class State(RecordFile):
    """The state of one container, as `state.json` stores it.

    - `folder`: the folder with `state.json`; not a field of the file
    - `created`: when create began, as RFC 3339, UTC
    - `owner_uid`: the uid on the host of the user who ran create
    - `pid`: init's pid; 0 if create was killed before it cloned init
    - `start_time`: when init started, in clock ticks since boot
    - `private_pids`: the container has a new pid namespace
    - `cgroup`: the result of `Cgroup.record`, None without a cgroup
    - `complete`: create has succeeded
    - `keyring`: name of the session keyring that an exec joins, empty for none
    - `started_at_ns`: wall-clock time of the start. Only for a container of a pod, whose shim
      writes the state.
    - `streams`: the names (`kernel.fd.stream_name`) of the container's descriptors 0 to 2 at
      create; None until they are known, and in a file that an earlier version has written
    """

    name = STATE
    id: str
    folder: str = ""
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
    streams: Sequence[str] | None = None

    @classmethod
    def of_spec(cls, container_id: str, folder: str, bundle: str, spec: Spec) -> State:
        """Return a new state, without a process, for a container with this specification."""
        pids = spec.linux.namespace("pid")
        return cls(
            container_id,
            folder,
            bundle,
            oci_version=spec.version,
            annotations=dict(spec.annotations),
            created=now(),
            private_pids=pids is not None and not pids.path,
        )

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> State:
        return super().read(folder).replace(folder=os.fspath(folder))

    def to_fields(self) -> Message:
        """Return the content of state.json: all fields but `folder`."""
        fields = super().to_fields()
        del fields["folder"]
        return fields

    def save(self, **changes: Any) -> None:
        """Set the fields `changes` and write state.json anew."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.write(self.folder)

    def group(self) -> Cgroup | None:
        """Return the container's cgroup; None when `create` has made none."""
        if self.cgroup is None:
            return None
        from pyrunc.cgroups.group import Cgroup

        return Cgroup.from_record(self.cgroup)

    def config(self) -> dict[str, Any]:
        """Return the container's stored configuration. Raises NotFound when a killed create has not
        written it."""
        try:
            document = jsontext.loads(read_file(f"{self.folder}/{CONFIG}"))
        except FileNotFoundError:
            raise NotFound(f"container {self.id} has no configuration") from None
        assert isinstance(document, dict)
        return document

    def store_config(self, document: dict[str, Any]) -> None:
        """Replace the container's stored configuration, which `config` returns."""
        text = jsontext.dumps(document).encode("ascii")
        atomic_file.write_bytes(f"{self.folder}/{CONFIG}", text)


def claim(root: str, container_id: str) -> str:
    """Make the container's folder and so claim the id. Returns the folder's path. Raises
    AlreadyExists if a folder with this name exists, InvalidArgument for an invalid id."""
    check_id(container_id)
    _make_root(root)
    folder = f"{root}/{container_id}"
    try:
        # mkdir sets the sticky bit at once, so even a killed create leaves no folder without it.
        os.mkdir(folder, CLAIMED)
    except FileExistsError:
        if not _is_container(folder, container_id):
            raise AlreadyExists(f"{folder} exists and does not belong to a container") from None
        raise AlreadyExists(f"container with given ID already exists: {container_id}") from None
    return folder


def _make_root(root: str) -> None:
    """Create the folder `root`, which holds the folders of all containers, if it does not exist.
    Raises OSError."""
    if os.path.isdir(root):
        return
    # Others may enter the default root, because the CRI server's socket is in it.
    os.makedirs(root, 0o711 if root == DEFAULT_ROOT else 0o700, exist_ok=True)
    # Cleaners of $XDG_RUNTIME_DIR leave sticky folders alone (XDG Base Directory Specification).
    if root == f"{os.environ.get('XDG_RUNTIME_DIR', '')}/{NAME}":
        os.chmod(root, 0o1700)


def find(root: str, container_id: str) -> State:
    """Read a container's state. A folder that a killed create left without state.json gives a state
    with pid 0. Raises NotFound, DamagedRecord, InvalidArgument for an invalid id."""
    check_id(container_id)
    folder = f"{root}/{container_id}"
    try:
        return _read(folder, container_id)
    except NotFound:
        if _is_claimed(folder):
            return State(container_id, folder, created=_rfc3339(os.stat(folder).st_mtime_ns))
        raise NotFound(f"container does not exist: {container_id}") from None


def _is_claimed(folder: str) -> bool:
    """Return whether the folder has the sticky bit that create's mkdir sets. Such a folder without
    state.json was left by a killed create."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    return S_ISDIR(status.st_mode) and bool(status.st_mode & S_ISVTX)


def _is_container(folder: str, container_id: str) -> bool:
    """Return whether the folder belongs to a container, also with a damaged state.json, so that the
    damage is reported."""
    try:
        _read(folder, container_id)
    except NotFound:
        return _is_claimed(folder)
    except (DamagedRecord, ValueError):
        pass
    return True


def _read(folder: str, container_id: str) -> State:
    try:
        document = atomic_file.read_json(f"{folder}/{STATE}")
    except NotADirectoryError:
        raise NotFound(f"{folder} is not a folder") from None
    if document.get("id") != container_id:
        raise NotFound(f"{folder}/{STATE} is not the record of a container {container_id}")
    return State.of({**document, "folder": folder}, DamagedRecord)


def ids(root: str) -> list[str]:
    """Return the ids of all containers below `root`, sorted. Raises FileNotFoundError."""
    return sorted(
        entry.name
        for entry in os.scandir(root)
        if entry.name[0] in FIRST
        and FOLLOWING.issuperset(entry.name)
        and entry.is_dir(follow_symlinks=False)
        and _is_container(entry.path, entry.name)
    )


def remove(path: str) -> None:
    """Remove a container's folder. Does nothing when the folder is gone. During the call, other
    processes may remove files (a second delete) or add files (an exec that stores its compiled
    program)."""
    try:
        # In any order: a killed delete leaves a folder that is still claimed (its sticky bit), so
        # it can be repeated.
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
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
    """A context manager with the container's lock. Only one process at a time can start, change or
    delete the container. Entering waits for the lock without a time limit, then reads the state and
    returns it. Raises NotFound if the container was deleted during the wait, even if a new
    container has its id."""

    __slots__ = ("_descriptor", "_state")

    def __init__(self, state: State) -> None:
        self._state, self._descriptor = state, -1

    @staticmethod
    def is_held(state: State) -> bool:
        """Return whether another process holds the lock right now."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            with closing_fd(os.open(state.folder, flags)) as descriptor:
                # Shared, so that two commands that only look do not take each other for a create.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            return True
        return False

    def __enter__(self) -> State:
        try:
            self._descriptor = os.open(
                self._state.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
        except FileNotFoundError:
            raise NotFound(f"container does not exist: {self._state.id}") from None
        try:
            # flock(2) on the folder needs no lock file, and the kernel drops the lock when the
            # process ends, also by SIGKILL.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            return self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read(self) -> State:
        old, folder = self._state, self._state.folder
        state = find(os.path.dirname(folder), old.id)
        try:
            # The folder may have been removed, and a new container's folder may have its path. A
            # lock of the old folder does not lock the new one.
            is_locked = os.path.samestat(os.fstat(self._descriptor), os.stat(folder))
        except FileNotFoundError:
            is_locked = False
        if not is_locked or old.pid not in (0, state.pid):
            raise NotFound(f"container does not exist: {old.id}")
        return state

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def now() -> str:
    """Return the time as RFC 3339 with nanoseconds, UTC."""
    return _rfc3339(time.time_ns())


def _rfc3339(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest_ns:09d}Z"


def owner_name(uid: int) -> str:
    """Return the user's name in /etc/passwd, else the number. NSS is not used, because it would
    load libraries."""
    try:
        for line in read_file("/etc/passwd").splitlines():
            fields = line.split(b":")
            if len(fields) > 2 and fields[2] == str(uid).encode():
                return fields[0].decode("utf-8", "replace")
    except OSError:
        pass
    return str(uid)
