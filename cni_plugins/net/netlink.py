"""Netlink sockets for `rtnetlink` and `nfnetlink`: send a batch of requests and read all answers.

With batches a whole pod is set up in two round trips. The kernel handles the requests of a batch in
order. Each error becomes a KernelError with the request's name, its subject and the kernel's
extended explanation (netlink(7), NETLINK_EXT_ACK).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pyrunc.errors import KernelError, kernel_errors

NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLM_F_DUMP = 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SOL_NETLINK, _CAP_ACK, _EXT_ACK, _STRICT_CHECK = 270, 10, 11, 12
_NLM_F_CAPPED, _NLM_F_ACK_TLVS, _NLM_F_DUMP_INTR = 0x100, 0x200, 0x10
_NLA_NESTED, _NLA_TYPE_MASK = 0x8000, 0x3FFF
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HEADER = struct.Struct("IHHII")
_ATTRIBUTE = struct.Struct("HH")
# recv(2) cuts a packet that is larger than the buffer. In a dump the kernel sends packets of at
# most 32 KiB (netlink_recvmsg, net/netlink/af_netlink.c).
_RECEIVE_BYTES = 1 << 17
_RECEIVE_TIMEOUT = struct.pack("ll", 10, 0)  # struct timeval
_DUMP_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class NetlinkRequest:
    """A netlink message without its header.

    - `kind`: the message type
    - `name`, `subject`: for error messages only
    - `flags`: if they have neither NLM_F_ACK nor NLM_F_DUMP, the kernel sends a single answer
    """

    kind: int
    body: bytes
    name: str
    subject: str = ""
    flags: int = NLM_F_ACK


def attribute(kind: int, value: bytes | str | int) -> bytes:
    """Encode a netlink attribute: an int as 32 bits in host byte order, a str NUL-terminated."""
    if isinstance(value, int):
        value = struct.pack("I", value)
    elif isinstance(value, str):
        value = value.encode() + b"\0"
    length = 4 + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NLA_NESTED, b"".join(attributes))


def attributes(body: bytes, offset: int = 0) -> dict[int, bytes]:
    """Decode the netlink attributes of `body` from `offset` on: kind -> value. For a repeated kind,
    return the last value."""
    return dict(each_attribute(body, offset))


def each_attribute(body: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    end = len(body)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4 or offset + length > end:
            return
        yield kind & _NLA_TYPE_MASK, body[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def text(value: bytes | None) -> str:
    """Decode a NUL-terminated string attribute; None becomes an empty string."""
    return (value or b"").rstrip(b"\0").decode("utf-8", "replace")


class NetlinkSocket:
    """A netlink socket in the network namespace in which it was created. A context manager, which
    closes the socket."""

    def __init__(self, protocol: int) -> None:
        with kernel_errors("socket", f"AF_NETLINK protocol {protocol}"):
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
            )
        # Not settimeout(): Python then calls poll(2) before every send and receive.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_TIMEOUT)
        # NETLINK_CAP_ACK (Linux 4.3): an error echoes the header only, since echoes of a large
        # batch would overflow the receive buffer. NETLINK_GET_STRICT_CHK (4.20): RTM_GETADDR
        # filters by the index.
        for option in (_CAP_ACK, _EXT_ACK, _STRICT_CHECK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._sequence = 0
        self._interrupted = False

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> NetlinkSocket:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, *requests: NetlinkRequest) -> None:
        """Send all requests at once, and wait for all answers. Raises the KernelError of the first
        request that failed."""
        for outcome in self.attempt(*requests):
            if isinstance(outcome, KernelError):
                raise outcome

    def attempt(self, *requests: NetlinkRequest) -> list[list[bytes] | KernelError]:
        """Send all requests at once. Returns, for each request, the bodies of its answers or its
        error. The kernel continues after a failed request."""
        first = self._sequence + 1
        self._sequence += len(requests)
        last = len(requests) - 1
        self._send(
            b"".join(
                _encode(r, first + i, r.flags if i == last else r.flags & ~NLM_F_ACK)
                for i, r in enumerate(requests)
            ),
            requests[0],
        )
        answers: list[list[bytes]] = [[] for _ in requests]
        errors: dict[int, KernelError] = {}
        is_complete = False
        while not is_complete:
            for kind, flags, sequence, body in self._receive(requests[0]):
                index = sequence - first
                # A late answer to a request that timed out: the socket stays open for later
                # requests.
                if not 0 <= index <= last:
                    continue
                if kind not in (_NLMSG_ERROR, _NLMSG_DONE):
                    answers[index].append(body)
                # The error of a dump is in NLMSG_DONE, the error of any other request in
                # NLMSG_ERROR.
                elif error := _error(requests[index], flags, body):
                    errors[index] = error
                is_complete |= index == last and (
                    kind in (_NLMSG_ERROR, _NLMSG_DONE)
                    or not requests[last].flags & (NLM_F_ACK | NLM_F_DUMP)
                )
        return [errors.get(i) or answers[i] for i in range(len(requests))]

    def try_call(self, request: NetlinkRequest, *tolerated: int) -> list[bytes] | None:
        """Send a request and return the bodies of its answers; None if it fails with an errno in
        `tolerated`. Raises any other KernelError."""
        (outcome,) = self.attempt(request)
        if not isinstance(outcome, KernelError):
            return outcome
        if outcome.errno not in tolerated:
            raise outcome
        return None

    def dump(self, request: NetlinkRequest, *tolerated: int) -> list[bytes]:
        """Send a dump request and return the bodies of all listed objects; an empty list if the
        request fails with an errno in `tolerated`. Raises any other KernelError.

        If the objects change during the dump (NLM_F_DUMP_INTR), repeats it. If they keep changing,
        raises KernelError EINTR.
        """
        dump_request = replace(request, flags=request.flags & ~NLM_F_ACK | NLM_F_DUMP)
        for _ in range(_DUMP_ATTEMPTS):
            self._interrupted = False
            answers = self.try_call(dump_request, *tolerated) or []
            if not self._interrupted:
                return answers
        raise KernelError(
            request.name, request.subject, errno.EINTR, "the list changed during each attempt"
        )

    def send_batch(
        self, begin: bytes, requests: tuple[NetlinkRequest, ...], end: bytes
    ) -> list[KernelError | None]:
        """Send an nfnetlink transaction: `requests` between the messages `begin` and `end`. Returns
        for each request its error, or None. Raises KernelError if the kernel rejects the
        transaction as a whole.

        If one request fails, the kernel undoes the whole transaction.
        """
        first = self._sequence + 1
        self._sequence += len(requests) + 2
        frames = [_HEADER.pack(16 + len(begin), 0x10, NLM_F_REQUEST, first - 1, 0) + begin]
        frames += [_encode(r, first + i, r.flags) for i, r in enumerate(requests)]
        frames.append(
            _HEADER.pack(16 + len(end), 0x11, NLM_F_REQUEST, first + len(requests), 0) + end
        )
        self._send(b"".join(frames), requests[0])
        outcomes: dict[int, KernelError | None] = {}
        while len(outcomes) < len(requests):
            for kind, flags, sequence, body in self._receive(requests[0]):
                index = sequence - first
                if kind != _NLMSG_ERROR:
                    continue
                # Also when the kernel aborts the batch, it answers each request (nfnl_err_deliver),
                # and one answer has the error. It reports EPERM and ENOMEM for the message `begin`
                # instead.
                if 0 <= index < len(requests):
                    outcomes[index] = _error(requests[index], flags, body)
                elif failure := _error(requests[0], flags, body):
                    raise failure
        return [outcomes[i] for i in range(len(requests))]

    def _send(self, frames: bytes, request: NetlinkRequest) -> None:
        with kernel_errors(request.name, request.subject):
            try:
                self._socket.send(frames)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    raise
                # Larger than net.core.wmem_default. The answers are shorter than their requests,
                # but all of them wait in the receive buffer at once.
                for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, len(frames))
                self._socket.send(frames)

    def _receive(self, request: NetlinkRequest) -> Iterator[tuple[int, int, int, bytes]]:
        try:
            packet = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            raise KernelError(request.name, request.subject, errno.ETIMEDOUT) from None
        except OSError as error:
            raise KernelError.of(error, request.name, request.subject) from None
        offset = 0
        while offset + 16 <= len(packet):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(packet, offset)
            if kind != _NLMSG_ERROR and flags & _NLM_F_DUMP_INTR:
                self._interrupted = True
            yield kind, flags, sequence, packet[offset + 16 : offset + length]
            offset += (length + 3) & ~3


class HostSocket:
    """Opens netlink sockets of one protocol. Calling an instance returns a context manager that
    yields a socket: `with host_socket() as socket`.

    Each `with` block gets a new socket. After `keep_open` all `with` blocks get the same one."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._shared: NetlinkSocket | None = None

    def keep_open(self) -> None:
        """Open one socket in the current namespace. All later `with` blocks get this socket. A
        process that serves many requests calls this."""
        self._shared = NetlinkSocket(self._protocol)

    @contextmanager
    def __call__(self) -> Iterator[NetlinkSocket]:
        if self._shared is not None:
            yield self._shared
            return
        with NetlinkSocket(self._protocol) as own:
            yield own


def _encode(request: NetlinkRequest, sequence: int, flags: int) -> bytes:
    return (
        _HEADER.pack(16 + len(request.body), request.kind, flags | NLM_F_REQUEST, sequence, 0)
        + request.body
    )


def _error(request: NetlinkRequest, flags: int, body: bytes) -> KernelError | None:
    """Return the error in an answer to `request`, with the kernel's explanation if there is one;
    None for an acknowledgement. `flags`, `body`: those of the answer."""
    number = -struct.unpack_from("i", body)[0] if len(body) >= 4 else 0
    if number <= 0:
        return None
    note = ""
    if flags & _NLM_F_ACK_TLVS and len(body) >= 20:
        echoed = 16 if flags & _NLM_F_CAPPED else (struct.unpack_from("I", body, 4)[0] + 3) & ~3
        note = text(attributes(body, 4 + echoed).get(1))
    return KernelError(request.name, request.subject, number, note)
