"""Sends unsolicited neighbour advertisements (RFC 4861, 7.2.6), which tell neighbours that an IPv6
address has a new MAC address."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv6Address

from cni_plugins.net.rtnetlink import pack_mac

_ADVERTISEMENT, _OVERRIDE, _TARGET_LINK_ADDRESS = 136, 0x20000000, 2
_ALL_NODES = "ff02::1"
_HOPS = 255
"""The hop limit. Receivers drop an advertisement with a lower one, because a router may have
forwarded it."""


def open_advertiser() -> socket.socket:
    """Open the ICMPv6 socket that `advertise` needs, in the current network namespace."""
    return socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)


def advertise(
    sender: socket.socket, index: int, mac: str, addresses: Iterable[IPv6Address]
) -> None:
    """On the link `index` in the socket's namespace, advertise that each of `addresses` has the MAC
    address `mac`. Ignores errors of sending, because neighbours find the new MAC address later
    without an advertisement."""
    sender.setblocking(False)
    sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, _HOPS)
    sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    for address in addresses:
        # Without the flag Override neighbours keep the hardware address that they know (RFC 4861,
        # 7.2.5). The kernel computes the checksum of a raw ICMPv6 socket (RFC 3542, 3.1).
        packet = struct.pack(">BBHI", _ADVERTISEMENT, 0, 0, _OVERRIDE) + address.packed
        packet += bytes((_TARGET_LINK_ADDRESS, 1)) + pack_mac(mac)
        try:
            sender.sendto(packet, (_ALL_NODES, 0, 0, index))
        except OSError:
            continue
