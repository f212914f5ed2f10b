"""Claims the root and state directories for one server, and writes into each directory the path of
the other.

Both directories are locked while a server runs. Pods outlive the server and have files in both, so
for this boot each directory names the other. A server refuses to start with only one directory of
such a pair: it would find only half of each pod, and remove the pods as unfinished.

    <root>/server.json     {state, boot_id}: the directory with the sockets of this boot's pods
    <state>/server.json    {root_folder, boot_id}: the directory with their records and layers
    <root>/server.lock, <state>/server.lock    flock(2), mode 0600: every user who can open a
                                               file can lock it

Both server.json files also have the format of the pods (`FORMAT`) and the version of the server
that wrote the file. A server refuses pods of a newer format. Servers of formats 1 and 2 do not read
the key `format`, but they refuse pods if the key `root` in the state directory's file is not their
root directory. To make them refuse, this version writes the text `_REFUSED_BY_EARLIER` into `root`,
and the path into `root_folder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pyrunc
from cri_server.store import disk
from cri_server.store.facts import boot_id, entries
from cri_server.store.paths import DEFAULT_STATE, Paths
from pyrunc.atomic_file import NewerRecord
from pyrunc.errors import Error, NotFound, WrongState
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.full import disk_error, disk_errors
from pyrunc.records import RecordFile

log = logging.getLogger(__name__)

EARLIER_STATE = Path("/run/pyrunc")
"""The default state directory of earlier versions; it was also the OCI runtime's root. The server
still uses it while it contains pods of this boot."""
LOCK = "server.lock"
FORMAT = 3
"""The format of the pods: of their records, the files in their folders and the protocol of their
shims. Earlier versions, with the formats 1 and 2, do not record it."""
_REFUSED_BY_EARLIER = f"a later version of pyrunc-cri (pod format {FORMAT})"


class ServerFile(RecordFile):
    """The file `server.json`. Its two paths are valid during one boot only.

    - `boot_id`: the id of this boot.
    - `state`: the path of the state directory; only in the root directory's file.
    - `root_folder`: the path of the root directory; only in the state directory's file.
    - `root`: the key that earlier versions read in place of `root_folder`. They refuse to start
      with the value that this version writes.
    - `format`: the format of the pods.
    - `written_by`: the version of the server that wrote the file.
    """

    name = "server.json"
    boot_id: str
    root: str | None = None
    state: str | None = None
    root_folder: str | None = None
    format: int = 2
    written_by: str = "0.1.0"


@contextlib.contextmanager
def claimed(root: Path, state: Path) -> Iterator[Paths]:
    """Create and lock the root and state directories for the `with` block; yield their paths. The
    state directory is `state`, with one exception: if `state` is the default, but pods of `root`
    from this boot are in EARLIER_STATE, the state directory is EARLIER_STATE.

    Raises WrongState if another server uses one of the directories, if pods of this boot have their
    files in one of them and in a third directory, or if a newer version has written the pods.
    Raises ResourceExhausted on a full disk, KernelError if a directory or a lock file cannot be
    made for another reason.
    """
    with contextlib.ExitStack() as stack:
        _make(root, 0o700)
        stack.enter_context(_locked(root))
        paths = Paths(root, _choose_state(root, state))
        _make(paths.state, 0o711)
        stack.enter_context(_locked(paths.state))
        _check_owner(paths)
        _check_format(paths)
        with disk_errors("mkdir", str(root)):
            paths.prepare()
        # Last, so that a server that is refused above leaves the other server's records as they
        # were.
        _store(paths)
        yield paths


def _choose_state(root: Path, configured: Path) -> Path:
    """Return the state directory to use: the configured one, or the default of an earlier version
    while pods are in it. Raises WrongState if pods of `root` are in any other directory."""
    record = _load(root)
    remembered = Path(record.state) if record and record.state else _earlier_state(root)
    if remembered is None or _same(remembered, configured) or not entries(remembered / "sandboxes"):
        return configured
    if _same(configured, Path(DEFAULT_STATE)) and _same(remembered, EARLIER_STATE):
        log.warning(
            "pods of an earlier version are in %s, which remains the state directory"
            " until they are removed",
            remembered,
        )
        return remembered
    raise WrongState(
        f"the state of the pods of {root} is in {remembered}, not in {configured}:"
        f" start the server with --state {remembered}; to change the state directory, first remove"
        " the pods"
    )


def _earlier_state(root: Path) -> Path | None:
    """Return EARLIER_STATE if sandboxes of the root directory `root` are in it; else None. Early
    versions used this directory, and wrote no server.json."""
    sandboxes = set(entries(EARLIER_STATE / "sandboxes"))
    return EARLIER_STATE if sandboxes.intersection(disk.records_in(root / "sandboxes")) else None


def _check_owner(paths: Paths) -> None:
    """Raise WrongState if the pods in the state directory belong to another root directory."""
    record = _load(paths.state)
    owner = record and (record.root_folder or record.root)
    if owner and not _same(Path(owner), paths.root) and entries(paths.sandbox_states):
        raise WrongState(
            f"the pods in {paths.state} belong to {owner}, not to {paths.root}:"
            f" start with --root {owner}, or with another --state"
        )


def _check_format(paths: Paths) -> None:
    """Raise WrongState when a newer version has written the pods."""
    for folder, pods in (
        (paths.state, entries(paths.sandbox_states)),
        (paths.root, disk.records_in(paths.sandbox_records)),
    ):
        record = _read(folder) if pods else None
        if record is not None and record.format > FORMAT:
            raise WrongState(
                f"the pods in {folder} have format {record.format} of pyrunc-cri"
                f" {record.written_by}, and pyrunc-cri {pyrunc.__version__} reads formats up to"
                f" {FORMAT}: start that version, or remove these pods with it first"
            )


def _load(folder: Path) -> ServerFile | None:
    """Read server.json in `folder`. Return None if it is missing, unreadable or of another boot."""
    record = _read(folder)
    return record if record is not None and record.boot_id == boot_id() else None


def _read(folder: Path) -> ServerFile | None:
    """Read server.json in `folder`. Return None if it is missing or unreadable. Raises WrongState
    if a newer version has written it."""
    try:
        return ServerFile.read(folder)
    except NotFound:
        return None
    except NewerRecord as error:
        raise WrongState(f"a newer version of pyrunc-cri has used {folder}: {error}") from None
    except (Error, OSError) as error:
        log.warning("%s", error)
        return None


def _store(paths: Paths) -> None:
    """Write server.json in the root and state directories. A failure is only logged, because on a
    full disk kubelet needs the server to free space."""
    root, state, boot = os.path.realpath(paths.root), os.path.realpath(paths.state), boot_id()
    written = ServerFile(boot, format=FORMAT, written_by=pyrunc.__version__)
    for folder, record in (
        (paths.root, written.replace(state=state)),
        (paths.state, written.replace(root=_REFUSED_BY_EARLIER, root_folder=root)),
    ):
        try:
            record.write(folder, durable=folder == paths.root)
        except OSError as error:
            log.warning("%s", disk_error(error, "write", str(folder / record.name)))


def _make(folder: Path, mode: int) -> None:
    with disk_errors("mkdir", str(folder)):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for the `with` block. Raises WrongState if another server has locked it,
    ResourceExhausted on a full disk, KernelError if the lock file cannot be opened for another
    reason."""
    path = folder / LOCK
    with disk_errors("open", str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with closing_fd(descriptor):
        os.fchmod(descriptor, 0o600)  # earlier versions made it 0644
        try:
            # Not a lock of fcntl(2): the kernel drops such a lock when the process closes any
            # descriptor of the file.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongState(f"another server uses {folder}") from None
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a server uses `folder`. False also if `folder` does not exist. Raises
    KernelError if the lock file exists but cannot be opened."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise disk_error(error, "open", str(folder / LOCK)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
