"""The two directories belong to one server, and to each other.

Both are locked while a server runs. Pods outlive it: so each directory remembers the other for this
boot, and a server that would look for the pods of one where they are not, and end them as half
made, does not start.

    <root>/server.json     {state, boot_id}: where the pods of this boot have their sockets and facts
    <state>/server.json    {root, boot_id}: where their records and layers are
    <root>/server.lock, <state>/server.lock    flock(2), for root only: anybody who can open a file can lock it
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cri_server.store import disk
from cri_server.store.facts import boot_id, entries
from cri_server.store.paths import DEFAULT_STATE, Paths
from pyrunc.errors import Error, NotFound, WrongState
from pyrunc.kernel.full import disk_error, disk_errors
from pyrunc.records import RecordFile

log = logging.getLogger(__name__)

EARLIER_STATE = Path("/run/pyrunc")
"""The default of earlier versions, the OCI runtime's root as well. Pods that live there are found
until the next boot."""
LOCK = "server.lock"


class ServerFile(RecordFile):
    """The other directory of the pair, for this boot."""

    name = "server.json"
    boot_id: str
    root: str | None = None
    state: str | None = None


@contextlib.contextmanager
def claimed(root: Path, state: Path) -> Iterator[Paths]:
    """The directories made, locked and this server's while inside; `Paths.state` is where the pods
    of this boot are.

    Raises WrongState (another server runs in one of them, or pods of this boot belong to another
    pair), KernelError and ResourceExhausted with the folder's name.
    """
    with contextlib.ExitStack() as stack:
        _make(root, 0o700)
        stack.enter_context(_locked(root))
        paths = Paths(root, _place(root, state))
        _make(paths.state, 0o711)
        stack.enter_context(_locked(paths.state))
        _check_owner(paths)
        _prepare(paths)
        _remember(paths)
        yield paths


def _place(root: Path, asked: Path) -> Path:
    """Where the state is: as asked, or where pods of an earlier version live. Raises WrongState for
    pods elsewhere."""
    known = _recall(root)
    remembered = Path(known.state) if known and known.state else _earlier(root)
    if remembered is None or _same(remembered, asked) or not entries(remembered / "sandboxes"):
        return asked
    if _same(asked, Path(DEFAULT_STATE)) and _same(remembered, EARLIER_STATE):
        log.warning(
            "pods of an earlier version live in %s: it stays the state directory while they do",
            remembered,
        )
        return remembered
    raise WrongState(
        f"the pods of {root} have their state in {remembered}, not in {asked}: start with --state {remembered}, "
        f"or remove them first with a server that does"
    )


def _earlier(root: Path) -> Path | None:
    """The earlier default, when sandboxes of this root are there: versions that used it remembered
    nothing."""
    there = set(entries(EARLIER_STATE / "sandboxes"))
    return EARLIER_STATE if there.intersection(disk.records_in(root / "sandboxes")) else None


def _check_owner(paths: Paths) -> None:
    """Raises WrongState when pods in the state directory are another root's."""
    known = _recall(paths.state)
    owner = known and known.root
    if owner and not _same(Path(owner), paths.root) and entries(paths.sandbox_states):
        raise WrongState(
            f"the pods in {paths.state} are those of {owner}, not of {paths.root}: start with --root {owner}, "
            f"or with another --state"
        )


def _recall(folder: Path) -> ServerFile | None:
    """What the record in `folder` says; None without one of this boot."""
    try:
        found = ServerFile.read(folder)
    except NotFound:
        return None
    except (Error, OSError) as error:
        log.warning("%s", error)
        return None
    return found if found.boot_id == boot_id() else None


def _remember(paths: Paths) -> None:
    """A full disk keeps no server from starting: kubelet could not free it."""
    root, state, boot = os.path.realpath(paths.root), os.path.realpath(paths.state), boot_id()
    for folder, record in (
        (paths.root, ServerFile(boot, state=state)),
        (paths.state, ServerFile(boot, root=root)),
    ):
        try:
            record.write(folder, durable=folder == paths.root)
        except OSError as error:
            log.warning("%s", disk_error(error, "write", str(folder / record.name)))


def _prepare(paths: Paths) -> None:
    with disk_errors("mkdir", str(paths.root)):
        paths.prepare()


def _make(folder: Path, mode: int) -> None:
    with disk_errors("mkdir", str(folder)):
        folder.mkdir(mode=mode, parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while inside. Raises WrongState, KernelError, ResourceExhausted."""
    path = folder / LOCK
    with disk_errors("open", str(path)):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # earlier versions made it 0644
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongState(f"another server uses {folder}") from None
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a server runs that uses `folder`, which need not exist. Raises KernelError."""
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
