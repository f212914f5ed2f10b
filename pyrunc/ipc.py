"""Sends messages between processes of pyrunc: one JSON object per SOCK_SEQPACKET packet, with
descriptors (SCM_RIGHTS).

A packet is the JSON text. If the text is too long for a socket buffer, the packet is the byte `M`,
and the text is in a memfd, the first of the descriptors. Both ends run as the same user on sockets
in folders of mode 0700.
"""

from __future__ import annotations

import array
import os
from _socket import (
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_CTRUNC,
    MSG_NOSIGNAL,
    MSG_TRUNC,
    SCM_RIGHTS,
    SOL_SOCKET,
)

from pyrunc import jsontext
from pyrunc.atomic_file import write_all
from pyrunc.errors import PeerError
from pyrunc.kernel.fd import close_all, closing_fd, received

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Sequence
    from typing import Any

    Message = dict[str, Any]

# A packet is one message of the socket: above SO_SNDBUF less 32 bytes the kernel answers EMSGSIZE
# (net/unix/af_unix.c, unix_dgram_sendmsg). The default is 208 KiB (socket(7), wmem_default), so
# some packets fit in the queue at once.
INLINE_LIMIT_BYTES = 32 * 1024
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
MOST_FDS = 250  # SCM_MAX_FD is 253
_IN_MEMFD = b"M"


def encode(message: Message) -> bytes:
    """Return the JSON text of `message`. Strings may contain surrogate escapes, for paths that are
    not UTF-8."""
    return jsontext.dumps(message).encode("ascii")


def send(sock: socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message; the caller keeps its descriptors. Raises OSError (BlockingIOError on a full
    non-blocking socket)."""
    send_text(sock, encode(message), fds)


def send_text(sock: socket, text: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message; `text` is its JSON text, made by `encode`. The receiver gets copies of
    `fds`; the caller keeps its own. Raises OSError (BlockingIOError on a full non-blocking
    socket)."""
    if len(text) <= INLINE_LIMIT_BYTES:
        _send(sock, text, fds)
        return
    with closing_fd(open_memory("message", text)) as memory:
        _send(sock, _IN_MEMFD, [memory, *fds])


def receive(sock: socket, fds_limit: int = MOST_FDS) -> tuple[Message, list[int]] | None:
    """Receive the next message and its descriptors, which the caller closes. None when the peer has
    closed the connection.

    Raises BlockingIOError when a non-blocking socket has no message. Raises PeerError for a
    malformed packet, and for more than `fds_limit` descriptors. A long message has one additional
    descriptor, the memfd with its text, so a limit of 0 refuses long messages.
    """
    room = CMSG_SPACE(fds_limit * 4) if fds_limit else 0
    try:
        packet, ancillary, flags, _ = sock.recvmsg(INLINE_LIMIT_BYTES, room, MSG_CMSG_CLOEXEC)
    # A unix socket reports this instead of the end when the peer has closed with packets of ours
    # unread (net/unix/af_unix.c, unix_release_sock).
    except ConnectionResetError:
        return None
    fds = list(received(ancillary))
    # An empty packet looks like the end of the connection (recv(2)), but may carry descriptors.
    if not packet:
        close_all(fds)
        return None
    try:
        if flags & (MSG_TRUNC | MSG_CTRUNC):
            raise PeerError(
                "a received message was truncated: it exceeds the limit of bytes or descriptors"
            )
        if len(fds) > fds_limit:  # the room is aligned: 1 descriptor has room for 2
            raise PeerError(f"a message has {len(fds)} descriptors, more than {fds_limit}")
        text = packet
        if packet == _IN_MEMFD and fds:
            with closing_fd(fds.pop(0)) as memory:
                text = read_memory(memory)
        message = jsontext.loads(text)
        if not isinstance(message, dict):
            raise PeerError("a message is not a JSON object")
    except BaseException as error:
        close_all(fds)
        if isinstance(error, ValueError):
            raise PeerError(f"a message is not JSON: {error}") from None
        raise
    return message, fds


def open_memory(name: str, content: bytes) -> int:
    """Create a memfd with `content` and return its descriptor, at offset 0."""
    memory = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        write_all(memory, content)
        os.lseek(memory, 0, os.SEEK_SET)
    except BaseException:
        os.close(memory)
        raise
    return memory


def read_memory(memory: int) -> bytes:
    """Read all of a memfd, whatever the descriptor's offset. Raises PeerError above
    `MESSAGE_LIMIT_BYTES`."""
    size = os.fstat(memory).st_size
    if size > MESSAGE_LIMIT_BYTES:
        raise PeerError(f"a message has {size} bytes, more than {MESSAGE_LIMIT_BYTES}")
    parts = []
    offset = 0
    while offset < size:
        # Not read(2): both ends share the file's offset (unix(7): as if by dup(2)).
        part = os.pread(memory, size - offset, offset)
        # The sender can still truncate the memfd, which has no seals.
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _send(sock: socket, packet: bytes, fds: Sequence[int]) -> None:
    if not fds:
        # Our seccomp jails refuse sendmsg(2), which can carry descriptors.
        sock.send(packet, MSG_NOSIGNAL)
        return
    sock.sendmsg([packet], [(SOL_SOCKET, SCM_RIGHTS, array.array("i", fds))], MSG_NOSIGNAL)
