"""A client of the keeper, and functions that start and end the keeper. The keeper stores
descriptors and reaps orphans for servers and shims that were killed; pause/keeper.c documents its
messages. Calls block, without asyncio: a call takes some 30 µs, and at most `TIMEOUT_S` when the
keeper is stopped.

A client connects at its first call, and again when a new keeper has replaced the old one. The new
keeper does not have the old one's entries.
"""

from __future__ import annotations

import array
import os
import time

# not from `signal`, which imports enum
from _signal import SIGTERM, pidfd_send_signal  # type: ignore[import-not-found]
from _socket import (
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    SCM_RIGHTS,
    SO_RCVTIMEO,
    SO_SNDTIMEO,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    socket,
)
from errno import ECONNRESET, EMSGSIZE, ENOENT, EPROTO
from struct import Struct

from pyrunc import jsontext
from pyrunc.errors import KernelError, PeerError, Unavailable, Unsupported
from pyrunc.kernel.fd import close_all, closing_fd, received, short_path
from pyrunc.kernel.process import wait_end
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from pyrunc.records import Record

    Stored = TypeVar("Stored", bound=Record)

PROGRAM = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native", "keeper"
)
SOCKET, LOCK = "keeper.sock", "keeper.lock"
VERSION = 1
HELLO, PUT, GET, DROP, LIST, START, EXIT, NOTE = range(1, 9)
MESSAGE = Struct("=HHIiiiIQQ")
"""The header of each message: version, call, size of the name, errno, pid, wait status, count,
start time, time in ns."""
MESSAGE_LIMIT_BYTES = 128 * 1024
MOST_FDS = 32
TIMEOUT_S = 2.0
ABSENT_S = 10.0
"""After a call to the keeper has timed out, no call is sent to it for this long."""
LOCKED = 3
"""The exit code of a new keeper if another keeper already has the folder."""
_TRIES, _TRY_AGAIN_S = 100, 0.02
_QUIET = 1
_TIMEVAL = Struct("@ll")
# SIGKILL and SIGSTOP cannot be set (sigaction(2)); 32 and 33 belong to glibc (nptl(7)).
_CATCHABLE = [number for number in range(1, 65) if number not in (9, 19, 32, 33)]


class StoredEntry(Value):
    """The data and descriptors that the keeper stores under one name. The caller closes `fds`,
    which are copies of the stored descriptors."""

    data: bytes
    fds: list[int]

    def read(self, kind: type[Stored]) -> tuple[Stored, list[int]]:
        """Parse the data as an object of class `kind`; return the object and the descriptors. If
        the data is malformed, close the descriptors and raise PeerError."""
        try:
            return kind.of(jsontext.loads(self.data), PeerError), self.fds
        except BaseException as error:
            close_all(self.fds)
            if isinstance(error, ValueError):
                raise PeerError(f"an entry that the keeper stores is not JSON: {error}") from None
            raise


class OrphanExit(Value):
    """How a process ended. `status`: its wait status (wait(2)); `time_ns`: wall-clock time of the
    end in ns."""

    status: int
    time_ns: int


class _Answer:
    """The keeper's answer to a call. The caller closes its descriptors."""

    __slots__ = ("count", "data", "fds", "pid", "status", "time_ns")

    def __init__(self, head: tuple[int, ...], data: bytes, fds: list[int]) -> None:
        self.pid = head[4]
        self.status = head[5]
        self.count = head[6]
        self.time_ns = head[8]
        self.data, self.fds = data, fds


class _Request:
    """A request to the keeper: a packet and its descriptors. Raises KernelError (EMSGSIZE) when the
    packet is too long or has too many descriptors."""

    __slots__ = ("fds", "name", "packet")

    def __init__(
        self,
        call: int,
        name: str = "",
        data: bytes = b"",
        fds: Sequence[int] = (),
        *,
        count: int = 0,
        process: tuple[int, int] = (0, 0),
        status: int = 0,
    ) -> None:
        """Build the packet of a call.

        - `call`: the call's number
        - `process`: pid and start time of the process that the call is about
        - `status`: the wait status of that process
        - `count`: a number whose meaning depends on the call (pause/keeper.c)
        """
        pid, start_time = process
        encoded = name.encode()
        head = MESSAGE.pack(VERSION, call, len(encoded), 0, pid, status, count, start_time, 0)
        self.packet, self.name, self.fds = head + encoded + data, name, fds
        if len(self.packet) > MESSAGE_LIMIT_BYTES or len(fds) > MOST_FDS:
            what = f"{len(self.packet)} bytes, {len(fds)} descriptors"
            raise KernelError("keeper", name, EMSGSIZE, what)


class NoKeeper(Unavailable):
    """No keeper was started in this folder since the boot: it has no socket."""


class Keeper:
    """A client of the keeper in a folder. Not thread-safe.

    Every method raises:

    - Unavailable when no keeper answers
    - Unsupported for a keeper of another version
    - KernelError when the keeper refuses the request, for example because its store is full
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        timeout_s: float = TIMEOUT_S,
        on_close: Callable[[int], object] | None = None,
    ) -> None:
        """Make a client, which connects at its first call.

        `on_close` is called with the socket's number before the socket is closed. With `on_close`,
        a call on a broken connection raises Unavailable, and the next call connects again. Without
        `on_close`, such a call is repeated on a new connection.
        """
        self.folder = os.fspath(folder)
        self._timeout_s, self._on_close = timeout_s, on_close
        self._socket: socket | None = None
        self.refused: list[int] = []
        self._absent_until = 0.0

    def fileno(self) -> int:
        """Return the connection's descriptor, which becomes readable when the keeper ends; -1
        without a connection."""
        return self._socket.fileno() if self._socket else -1

    def close(self) -> None:
        """Close the connection. The next call connects again."""
        if self._socket:
            if self._on_close:
                self._on_close(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def hello(self) -> int:
        """Return the keeper's pid."""
        return self._ask(_Request(HELLO)).pid

    def put(self, name: str, data: bytes, fds: Sequence[int] = ()) -> None:
        """Store the data and copies of the descriptors under `name`. Replaces an earlier entry of
        this name. The caller's descriptors stay open."""
        self._ask(_Request(PUT, name, data, fds))

    def post_put(self, name: str, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a `put` without waiting for the answer. The keeper carries it out even if this
        process is killed now.

        If the keeper refuses it, the next `collect` returns the errno. `post_put`, `post_drop` and
        `post_note` raise Unavailable also when the socket is full.
        """
        self._post(_Request(PUT, name, data, fds, count=_QUIET))

    def post_drop(self, name: str) -> None:
        """Send a `drop` without waiting for the answer."""
        self._post(_Request(DROP, name, count=_QUIET))

    def post_note(self, pid: int, start_time: int, status: int) -> None:
        """Tell the keeper how our child `pid` ended, without waiting for the answer. `status`: the
        child's wait status (wait(2)).

        The caller must not reap the child before this call. If this process dies, the shim that
        takes the pod over gets the status from `exit_of`.
        """
        self._post(_Request(NOTE, process=(pid, start_time), status=status, count=_QUIET))

    def collect(self) -> list[int]:
        """Return the errnos of the posted calls that the keeper has refused since the last
        `collect`. Does not wait. Raises Unavailable when the keeper has closed the connection."""
        try:
            while self._socket is not None:
                self._take_refusal(self._receive(self._socket, MSG_DONTWAIT)[0])
        except BlockingIOError:
            pass
        except OSError as error:
            self.close()
            raise self._lost(error) from None
        refused, self.refused = self.refused, []
        return refused

    def get(self, name: str) -> StoredEntry | None:
        """Return the entry of this name; None if there is none."""
        answer = self._ask_for_entry(_Request(GET, name))
        return None if answer is None else StoredEntry(answer.data, answer.fds)

    def drop(self, name: str) -> None:
        """Remove the entry of this name and close its descriptors. Unknown names are ignored."""
        self._ask_for_entry(_Request(DROP, name))

    def names(self, prefix: str = "") -> list[str]:
        """Return all names in the keeper's store that begin with `prefix`."""
        names: list[str] = []
        passed = 0
        while True:
            answer = self._ask(_Request(LIST, prefix, count=passed))
            names += answer.data.decode().split("\0")[:-1]
            passed = answer.count
            if not passed:
                return names

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int]
    ) -> tuple[int, int]:
        """Execute a command as a child of the keeper, in a new session. Return its pid and a pidfd,
        which the caller closes. `fds`: descriptor number in the new process -> our number.

        If the command cannot be executed, the new process exits with code 127.
        """
        words = [*arguments, *(f"{name}={value}" for name, value in environment.items())]
        strings = b"".join(os.fsencode(word) + b"\0" for word in words)
        data = array.array("I", fds).tobytes() + strings
        # On a new connection, where `_exchange` repeats no request: the command must not run twice.
        self.close()
        answer = self._ask(_Request(START, "", data, list(fds.values()), count=len(arguments)))
        return answer.pid, answer.fds[0]

    def exit_of(self, pid: int, start_time: int) -> OrphanExit | None:
        """Return how a process ended: an orphan that the keeper has reaped, or a process that
        `post_note` reported. None if the keeper does not know the exit, or no longer stores it."""
        answer = self._ask_for_entry(_Request(EXIT, process=(pid, start_time)))
        return None if answer is None else OrphanExit(answer.status, answer.time_ns)

    def _ask_for_entry(self, request: _Request) -> _Answer | None:
        """Send a request for an entry or for a process's exit, and return the keeper's answer. None
        when the keeper does not have it (ENOENT)."""
        try:
            return self._ask(request)
        except KernelError as error:
            if error.errno != ENOENT:
                raise
            return None

    def _ask(self, request: _Request) -> _Answer:
        return self._checked(request.name, *self._exchange(request))

    def _post(self, request: _Request) -> None:
        try:
            self._send(request, MSG_DONTWAIT)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self.close()
            raise self._lost(error) from None

    def _exchange(self, request: _Request) -> tuple[bytes, list[int]]:
        is_old = self._socket is not None
        if time.monotonic() < self._absent_until:
            raise Unavailable(f"the keeper of {self.folder} does not answer")
        try:
            return self._exchange_once(request)
        except BlockingIOError:
            self.close()
            # So a stopped keeper costs one timeout every ABSENT_S, not one for each call.
            self._absent_until = time.monotonic() + ABSENT_S
            raise Unavailable(f"the keeper of {self.folder} does not answer") from None
        except OSError as error:
            self.close()
            # The keeper has closed the connection to make room for others, or was replaced.
            if is_old and self._on_close is None:
                return self._exchange(request)
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> Unavailable:
        if error.errno == ENOENT:
            return NoKeeper(f"no keeper was started in {self.folder}")
        return Unavailable(
            f"the connection to the keeper of {self.folder} failed: {error.strerror or error}"
        )

    def _exchange_once(self, request: _Request) -> tuple[bytes, list[int]]:
        connection = self._send(request)
        while True:
            answer, fds = self._receive(connection)
            if len(answer) < MESSAGE.size or answer[2:4] == request.packet[2:4]:  # of this call
                return answer, fds
            self._take_refusal(answer)

    def _send(self, request: _Request, flags: int = 0) -> socket:
        if self._socket is None:
            self._socket = self._connected()
        fds = array.array("i", request.fds)
        rights = [(SOL_SOCKET, SCM_RIGHTS, fds)] if fds else []
        self._socket.sendmsg([request.packet], rights, MSG_NOSIGNAL | flags)
        return self._socket

    def _take_refusal(self, answer: bytes) -> None:
        if len(answer) >= MESSAGE.size:
            self.refused.append(MESSAGE.unpack_from(answer)[3])

    def _receive(self, connection: socket, flags: int = 0) -> tuple[bytes, list[int]]:
        answer, control, _, _ = connection.recvmsg(
            MESSAGE_LIMIT_BYTES, CMSG_SPACE(MOST_FDS * 4), MSG_CMSG_CLOEXEC | flags
        )
        if not answer:
            raise ConnectionResetError(ECONNRESET, "the keeper closed the connection")
        return answer, list(received(control))

    def _checked(self, name: str, answer: bytes, fds: list[int]) -> _Answer:
        try:
            if len(answer) < MESSAGE.size:
                raise PeerError(
                    f"the keeper has sent an answer of {len(answer)} bytes, which is too short"
                )
            head = MESSAGE.unpack_from(answer)
            if head[0] != VERSION or head[3] == EPROTO:
                raise Unsupported(
                    f"the keeper of {self.folder} has version {head[0]}, not {VERSION}"
                )
            if head[3]:
                raise KernelError("keeper", name, head[3])
        except BaseException:
            close_all(fds)
            raise
        return _Answer(head, answer[MESSAGE.size :], fds)

    def _connected(self) -> socket:
        connection = socket(AF_UNIX, SOCK_SEQPACKET)
        try:
            seconds, rest = divmod(self._timeout_s, 1)
            limit = _TIMEVAL.pack(int(seconds), int(rest * 1_000_000))
            for option in (SO_RCVTIMEO, SO_SNDTIMEO):
                connection.setsockopt(SOL_SOCKET, option, limit)
            with short_path(self.folder) as path:
                connection.connect(f"{path}/{SOCKET}")
        except BaseException:
            connection.close()
            raise
        return connection


def ensure(folder: str | os.PathLike[str]) -> Keeper:
    """Return a connected client of the folder's keeper; start a keeper if there is none. Raises
    Unavailable, Unsupported, KernelError."""
    keeper = Keeper(folder)
    for _ in range(_TRIES):
        try:
            keeper.hello()
            return keeper
        except Unavailable:
            if keeper._absent_until:  # the keeper lives, but is stopped
                raise
        # Two servers may both get here: the lock file decides, and the loser finds the winner's
        # socket.
        code = _spawn(os.fspath(folder))
        if code == LOCKED:  # another keeper is starting or ending
            time.sleep(_TRY_AGAIN_S)
        elif code:
            raise Unavailable(f"{PROGRAM} {keeper.folder} has ended with exit code {code}")
    raise Unavailable(f"the keeper of {keeper.folder} does not listen")


def end(folder: str | os.PathLike[str]) -> None:
    """End the folder's keeper, if one answers, and wait at most `TIMEOUT_S` for its end. The
    descriptors in its store are closed."""
    keeper = Keeper(folder)
    try:
        pidfd = os.pidfd_open(keeper.hello())
    except (Unavailable, ProcessLookupError):
        return
    finally:
        keeper.close()
    with closing_fd(pidfd):
        pidfd_send_signal(pidfd, SIGTERM)
        wait_end(pidfd, TIMEOUT_S)


def _spawn(folder: str) -> int:
    """Start the executable `pyrunc-keeper`, which forks into the background. Return the exit code
    of its first process."""
    try:
        pid = os.posix_spawn(
            PROGRAM, ["pyrunc-keeper", folder], os.environ, setsigmask=[], setsigdef=_CATCHABLE
        )
    except OSError as error:
        raise KernelError("posix_spawn", PROGRAM, error.errno or 0) from None
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
