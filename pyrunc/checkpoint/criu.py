"""Speaks CRIU's RPC: spawns `criu swrk 3`, which serves one request on the socket that it gets as
descriptor 3.

The messages are protobuf. The few fields in use are encoded here, so that no protobuf library is
loaded. The constants have the names of CRIU's images/rpc.proto. Source: https://criu.org/RPC.
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, MSG_CMSG_CLOEXEC, SOCK_SEQPACKET
from _socket import socket as _Socket
from _socket import socketpair as _socketpair

from pyrunc.errors import Error, NotFound, PeerError
from pyrunc.kernel import fd as _fd
from pyrunc.kernel import restrict
from pyrunc.varint import varint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    FieldValue = bool | int | str | bytes
    Fields = Iterable[tuple[int, FieldValue]]
    FieldList = list[tuple[int, FieldValue]]
    Notify = Callable[[str, int, tuple[int, ...]], None]

# criu_req_type
DUMP, RESTORE, PRE_DUMP, NOTIFY = 1, 2, 4, 6
# criu_req, criu_resp, criu_notify
_REQ_TYPE, _REQ_OPTS, _REQ_NOTIFY_SUCCESS = 1, 2, 3
_RESP_TYPE, _RESP_SUCCESS, _RESP_RESTORE, _RESP_NOTIFY, _RESP_ERRNO = 1, 2, 4, 5, 7
_NOTIFY_SCRIPT, _NOTIFY_PID, _RESTORE_PID = 1, 2, 1
# criu_opts
IMAGES_DIR_FD = 1
PID = 2
LEAVE_RUNNING = 3
EXT_UNIX_SK = 4
TCP_ESTABLISHED = 5
SHELL_JOB = 7
FILE_LOCKS = 8
LOG_LEVEL = 9
LOG_FILE = 10
PAGE_SERVER = 11
NOTIFY_SCRIPTS = 12
ROOT = 13
PARENT_IMG = 14
TRACK_MEM = 15
AUTO_DEDUP = 16
WORK_DIR_FD = 17
LINK_REMAP = 18
EXT_MNT = 23
MANAGE_CGROUPS = 24
CG_ROOT = 25
RST_SIBLING = 26
INHERIT_FD = 27
EXT_MASTERS = 30
MANAGE_CGROUPS_MODE = 34
EXTERNAL = 37
EMPTY_NS = 38
JOIN_NS = 39
FREEZE_CGROUP = 44
TCP_SKIP_IN_FLIGHT = 46
LAZY_PAGES = 48
STATUS_FD = 49
ORPHAN_PTS_MASTER = 50
CONFIG_FILE = 51
TCP_CLOSE = 52
LSM_PROFILE, LSM_MOUNT_CONTEXT = 53, 63
CGROUP_MODES = {"ignore": 0, "soft": 3, "full": 4, "strict": 5}

SOCKET_NUMBER = 3
# Callers of a runtime may have no PATH; criu itself looks for nft and iptables in it.
USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LARGEST_MESSAGE_BYTES = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SHOWN_ERRORS, _SHOWN_BYTES = 5, 1 << 16


def message(fields: Fields) -> bytes:
    """Encode pairs (field number, value) as a protobuf message. Integers may be negative; the value
    of a nested message is its bytes."""
    encoded = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            # protobuf encodes a negative number as its two's complement of 64 bits, also for an
            # int32.
            encoded += varint(number << 3 | _VARINT) + varint(value & (1 << 64) - 1)
        else:
            content = os.fsencode(value) if isinstance(value, str) else value
            encoded += varint(number << 3 | _BYTES) + varint(len(content)) + content
    return bytes(encoded)


def decode(content: bytes) -> dict[int, int | bytes]:
    """Decode a protobuf message to a dict: field number -> value. If a field is repeated, the last
    value counts. Raises PeerError for a malformed message."""
    fields: dict[int, int | bytes] = {}
    offset = 0
    while offset < len(content):
        tag, offset = _read_varint(content, offset)
        kind = tag & 7
        if kind == _VARINT:
            # The last value of a field counts (protobuf, "Last One Wins").
            fields[tag >> 3], offset = _read_varint(content, offset)
            continue
        if kind == _BYTES:
            size, offset = _read_varint(content, offset)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise PeerError(f"criu sent a field of the unknown wire type {kind}")
        if offset + size > len(content):
            raise PeerError("criu sent a message that ends too early")
        fields[tag >> 3] = content[offset : offset + size]
        offset += size
    return fields


def _read_varint(content: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    # A varint has ten bytes of seven bits at most; a longer one would cost time without a limit.
    while offset < len(content) and shift < 70:
        byte = content[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
    raise PeerError("criu sent a message that ends too early")


class Criu:
    """A `criu swrk` process. A context manager: leaving it closes the socket and reaps the process.

    - `fds`: number in CRIU (from 4) -> our number, for the descriptors that INHERIT_FD names.
      Folders and STATUS_FD need no entry: their options contain our numbers, and CRIU opens these
      in our /proc/PID/fd (cr-service.c).
    - `no_new_privileges`: set no_new_privs for CRIU and each process it restores
    """

    __slots__ = ("_socket", "pid")

    def __init__(
        self,
        fds: Mapping[int, int],
        stdio: Sequence[int] = (0, 1, 2),
        *,
        no_new_privileges: bool = False,
    ) -> None:
        # CRIU's service socket is of this type: one message is one packet, without a length.
        ours, theirs = _socketpair(AF_UNIX, SOCK_SEQPACKET, 0)
        descriptors = {**dict(enumerate(stdio)), **fds, SOCKET_NUMBER: theirs.fileno()}
        copies: list[int] = []
        try:
            actions = []
            # Copies with numbers above every target, so that dup2 overwrites none that is needed.
            for target, source in descriptors.items():
                copies.append(copy := _fd.duplicate(source, max(descriptors) + 1))
                actions.append((os.POSIX_SPAWN_DUP2, copy, target))
            environment = {"PATH": USUAL_PATH, **os.environ}
            spawn = _spawn_without_new_privileges if no_new_privileges else os.posix_spawn
            command = ["criu", "swrk", str(SOCKET_NUMBER)]
            self.pid = spawn(find(), command, environment, file_actions=actions)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            _fd.close_all(copies)
        self._socket: _Socket = ours

    def __enter__(self) -> Criu:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        os.waitpid(self.pid, 0)

    def request(self, kind: int, options: Fields, notify: Notify | None = None) -> int:
        """Send one request and answer CRIU's notifications until the request is done. Return the
        restored process's pid, 0 for a dump. Raises PeerError.

        `notify(script, pid, descriptors)` is called for each notification; the descriptors are
        closed afterwards.
        """
        self._send(message([(_REQ_TYPE, kind), (_REQ_OPTS, message(options))]))
        while True:
            answer, fds = self._receive()
            try:
                if answer.get(_RESP_TYPE) != NOTIFY:
                    return _result(answer)
                notification = decode(as_bytes(answer.get(_RESP_NOTIFY, b"")))
                if notify is not None:
                    script = as_bytes(notification.get(_NOTIFY_SCRIPT, b"")).decode(
                        "ascii", "replace"
                    )
                    notify(script, _int(notification.get(_NOTIFY_PID, 0)), fds)
            finally:
                _fd.close_all(fds)
            # CRIU goes on only after this answer, so the processes stay frozen while we handle a
            # notification.
            self._send(message([(_REQ_TYPE, NOTIFY), (_REQ_NOTIFY_SUCCESS, True)]))

    def _send(self, content: bytes) -> None:
        try:
            self._socket.send(content)
        except OSError as error:
            raise PeerError(f"criu closed its socket: {os.strerror(error.errno or 0)}") from None

    def _receive(self) -> tuple[dict[int, int | bytes], tuple[int, ...]]:
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                LARGEST_MESSAGE_BYTES, 4 * 16 + 16, MSG_CMSG_CLOEXEC
            )
        except OSError:
            packet, ancillary = b"", []
        fds = _fd.received(ancillary)
        try:
            if not packet:
                raise PeerError("criu ended before it answered")
            return decode(packet), fds
        except BaseException:
            _fd.close_all(fds)
            raise


def _spawn_without_new_privileges(
    path: str,
    command: list[str],
    environment: Mapping[str, str],
    *,
    file_actions: list[tuple[int, int, int]],
) -> int:
    """Spawn a process with no_new_privs; return its pid. A separate thread sets the flag for itself
    and spawns the process, so hooks, which other threads spawn, do not inherit the flag
    (prctl(2))."""
    from threading import Thread

    pids: list[int] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            restrict.no_new_privileges()
            pids.append(os.posix_spawn(path, command, environment, file_actions=file_actions))
        except (OSError, Error) as error:
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    # Joined at once: posix_spawn returns when the program is executed, and the thread's flag ends
    # with it.
    thread.join()
    if failed:
        raise failed[0]
    return pids[0]


def _result(answer: Mapping[int, int | bytes]) -> int:
    """Return the restored process's pid from CRIU's response, 0 for a dump. If CRIU failed, raise
    PeerError with the errno's text.

    The response's own message is ignored: it is the first error of CRIU's log, and that error is
    often harmless.
    """
    if not answer.get(_RESP_SUCCESS):
        number = _int(answer.get(_RESP_ERRNO, 0))
        raise PeerError(f"criu failed: {os.strerror(number).lower()}" if number else "criu failed")
    restored = decode(as_bytes(answer.get(_RESP_RESTORE, b"")))
    return _int(restored.get(_RESTORE_PID, 0))


def find() -> str:
    """Return the path of the executable `criu` in $PATH (without PATH, in USUAL_PATH). Raises
    NotFound."""
    for folder in os.environ.get("PATH", USUAL_PATH).split(":"):
        if os.access(f"{folder}/criu", os.X_OK):
            return f"{folder}/criu"
    raise NotFound("criu is not in $PATH: checkpoint and restore need it")


def as_bytes(value: int | bytes) -> bytes:
    """Return the value of a decoded field; empty bytes if the value is a number."""
    return value if isinstance(value, bytes) else b""


def _int(value: int | bytes) -> int:
    return value if isinstance(value, int) else 0


def errors_of(folder: str, log: str) -> str:
    """Return the last lines with errors in CRIU's log, for an error message; "" if there are
    none."""
    # Without following links and without waiting: the folder may be a user's, the name a link or a
    # FIFO.
    try:
        number = os.open(
            os.path.join(folder, log), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        with open(number, "rb", buffering=0) as file:
            file.seek(max(0, os.fstat(number).st_size - _SHOWN_BYTES))
            content = file.read(_SHOWN_BYTES) or b""
    except OSError:
        return ""
    lines = [
        line.strip().decode("utf-8", "replace") for line in content.splitlines() if b"Error" in line
    ]
    return "; ".join(lines[-_SHOWN_ERRORS:])
