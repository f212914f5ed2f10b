"""Unsolicited neighbour advertisements (RFC 4861, 7.2.6): IPv6's word that an address has another
hardware address now."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv6Address

from cni_plugins.net.rtnetlink import pack_mac

_ADVERTISEMENT, _OVERRIDE, _TARGET_LINK_ADDRESS = 136, 0x20000000, 2
_ALL_NODES = "ff02::1"
_HOPS = 255
"""Advertisements with fewer hops left are dropped: they cannot come from the link."""


def open_advertiser() -> socket.socket:
    """A socket of the present namespace to send them from."""
    return socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)


def advertise(
    sender: socket.socket, index: int, mac: str, addresses: Iterable[IPv6Address]
) -> None:
    """Send one for each address from link `index` of the sender's namespace. What cannot be sent is
    not an error."""
    sender.setblocking(False)
    sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
    sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    for address in addresses:
        packet = struct.pack(">BBHI", _ADVERTISEMENT, 0, 0, _OVERRIDE) + address.packed
        packet += bytes((_TARGET_LINK_ADDRESS, 1)) + pack_mac(mac)
        try:
            sender.sendto(packet, (_ALL_NODES, 0, 0, index))
        except OSError:
            continue
