"""Finds network links, moves them to another network namespace, gives them addresses and brings
them up, by rtnetlink.

The four messages that a runtime needs are built here, because importing an rtnetlink library takes
longer than the start of a container. Source: rtnetlink(7),
include/uapi/linux/{rtnetlink,if_link,if_addr}.h.
"""

from __future__ import annotations

import os
from _socket import AF_NETLINK, SOCK_CLOEXEC, SOCK_RAW, socket
from errno import ENODEV
from struct import Struct

from pyrunc.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER, _LINK, _ADDRESS = Struct("=IHHII"), Struct("=BxHiII"), Struct("=BBBBI")
_ATTRIBUTE, _ERROR = Struct("=HH"), Struct("=i")
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP, NLM_F_CREATE, NLM_F_EXCL = 1, 4, 0x300, 0x400, 0x200
RTM_NEWLINK, RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR = 16, 18, 20, 22
IFLA_IFNAME, IFLA_NET_NS_FD = 3, 28
IFA_FLAGS = 8
# The attributes of an address that are copied: address, local, broadcast, flags, metric, who set
# it. The label is not copied, because it has the link's old name, nor the lifetime, because it is
# endless.
IFA_COPIED = (1, 2, 4, IFA_FLAGS, 9, 11)
IFA_F_PERMANENT = 0x80
RT_SCOPE_UNIVERSE = 0
IFF_UP = 1
# A message of a dump has up to 32 KiB (netlink_dump, net/netlink/af_netlink.c); recv(2) would cut
# it at the end of a shorter buffer.
RECEIVE_BYTES = 1 << 16

Attributes = list[tuple[int, bytes]]


class RawLinkAddress:
    """An IP address of a link, parsed from the kernel's netlink message `message`."""

    __slots__ = ("attributes", "family", "flags", "link", "prefix_bits", "scope")

    def __init__(self, message: bytes) -> None:
        self.family, self.prefix_bits, flags, self.scope, self.link = _ADDRESS.unpack_from(message)
        self.attributes = dict(_attributes(message, _ADDRESS.size))
        # The header has room for eight flags; newer ones, such as IFA_F_NOPREFIXROUTE, are in the
        # attribute only (linux/if_addr.h).
        whole = self.attributes.get(IFA_FLAGS)
        self.flags = int.from_bytes(whole, "little") if whole else flags


class Routing:
    """A context manager with a NETLINK_ROUTE socket. The socket acts in the network namespace in
    which it was opened."""

    def __init__(self) -> None:
        self._socket = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 0)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def index(self, name: str) -> int:
        """Return the index of the link `name`. Raises KernelError, with ENODEV when there is no
        such link."""
        answers = self._ask(
            RTM_GETLINK, NLM_F_ACK, _LINK.pack(0, 0, 0, 0, 0), [_name(name)], f"link '{name}'"
        )
        index: int = _LINK.unpack_from(answers[0])[2]
        return index

    def has(self, name: str) -> bool:
        """Return whether there is a link with that name."""
        try:
            self.index(name)
        except KernelError as error:
            if error.errno != ENODEV:
                raise
            return False
        return True

    def indices(self) -> set[int]:
        """Return the indices of all links."""
        answers = self._ask(RTM_GETLINK, NLM_F_DUMP, _LINK.pack(0, 0, 0, 0, 0), [], "links")
        return {_LINK.unpack_from(link)[2] for link in answers}

    def change_link(
        self,
        index: int,
        *,
        flags: int = 0,
        mask: int = 0,
        name: str = "",
        namespace_fd: int = -1,
        what: str = "",
    ) -> None:
        """Change the link with number `index` by one RTM_NEWLINK. Raises KernelError.

        - `flags`, `mask`: each flag (IFF_…) in `mask` is set if it is in `flags` too, else cleared.
          Other flags stay.
        - `name`: the link's new name, in which `%d` becomes the first free number
        - `namespace_fd`: the network namespace to which the link moves
        - `what`: the change, for an error's text
        """
        attributes: Attributes = []
        if namespace_fd >= 0:
            attributes.append((IFLA_NET_NS_FD, namespace_fd.to_bytes(4, "little")))
        if name:
            attributes.append(_name(name))
        self._ask(RTM_NEWLINK, NLM_F_ACK, _LINK.pack(0, 0, index, flags, mask), attributes, what)

    def addresses(self, index: int) -> list[RawLinkAddress]:
        """Return all addresses of the link."""
        answers = self._ask(RTM_GETADDR, NLM_F_DUMP, _ADDRESS.pack(0, 0, 0, 0, 0), [], "addresses")
        # A dump ignores the link's number in a request, unless the socket has
        # NETLINK_GET_STRICT_CHK (Linux 4.20).
        return [a for a in map(RawLinkAddress, answers) if a.link == index]

    def add_address(self, index: int, address: RawLinkAddress, what: str) -> None:
        """Add an address to the link with number `index`. Raises KernelError.

        - `address`: an item of `addresses`, also of another link or network namespace
        - `what`: the change, for an error's text
        """
        header = _ADDRESS.pack(
            address.family, address.prefix_bits, address.flags & 0xFF, address.scope, index
        )
        attributes = [
            (key, value) for key, value in address.attributes.items() if key in IFA_COPIED
        ]
        self._ask(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, header, attributes, what)

    def _ask(
        self, kind: int, flags: int, body: bytes, attributes: Attributes, what: str
    ) -> list[bytes]:
        """Send one netlink request and return the bodies of its answers. `what` names the request
        in an error's text. Raises KernelError."""
        self._sequence += 1
        for key, value in attributes:
            body += (
                _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), key)
                + value
                + b"\0" * (-len(value) % 4)
            )
        header = _HEADER.pack(
            _HEADER.size + len(body), kind, flags | NLM_F_REQUEST, self._sequence, 0
        )
        self._socket.send(header + body)
        answers: list[bytes] = []
        while True:
            for answer, sequence, text in _messages(self._socket.recv(RECEIVE_BYTES)):
                if sequence != self._sequence:
                    continue
                if answer == NLMSG_DONE:
                    return answers
                if answer == NLMSG_ERROR:
                    code = -_ERROR.unpack_from(text)[0]
                    if code:
                        raise KernelError("netlink", what, code)
                    return answers
                answers.append(text)


def _name(name: str) -> tuple[int, bytes]:
    return IFLA_IFNAME, os.fsencode(name) + b"\0"


def _attributes(message: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    while offset + _ATTRIBUTE.size <= len(message):
        size, key = _ATTRIBUTE.unpack_from(message, offset)
        # The upper two bits are flags: nested, and network byte order (NLA_TYPE_MASK,
        # linux/netlink.h).
        yield key & 0x3FFF, message[offset + _ATTRIBUTE.size : offset + size]
        offset += (size + 3) & ~3


def _messages(packet: bytes) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(packet):
        size, kind, _, sequence, _ = _HEADER.unpack_from(packet, offset)
        yield kind, sequence, packet[offset + _HEADER.size : offset + size]
        offset += (size + 3) & ~3
