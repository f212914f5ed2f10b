"""Host ports of SCTP: packets are forwarded and answered with a correct checksum.

The kernel may lack SCTP sockets, but it tracks and translates the protocol. Both ends are raw
sockets here, which send an association's first two packets (RFC 9260, 3.3.2 and 3.3.3).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import pytest

from cni_plugins.net import netns
from tests.kernel.cni.harness import CLIENT, CLIENT6, HOST_OUTER, HOST_OUTER6, Host
from tests.kernel.cni.test_portmap import WEB, publish

INIT, INIT_ACK = 1, 2
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


@dataclass(frozen=True)
class Packet:
    """An SCTP packet with one chunk that opens an association."""

    source: int
    target: int
    tag: int
    kind: int

    def encode(self) -> bytes:
        chunk = struct.pack(">BBHIIHHI", self.kind, 0, 20, 0x1234, 65536, 1, 1, 7)
        if self.kind == INIT_ACK:
            chunk = struct.pack(
                ">BBHIIHHI", self.kind, 0, 28, 0x5678, 65536, 1, 1, 9
            ) + struct.pack(">HHI", 7, 8, 0)
        ports = struct.pack(">HHI", self.source, self.target, self.tag)
        return ports + struct.pack("<I", crc32c(ports + bytes(4) + chunk)) + chunk

    @classmethod
    def decode(cls, content: bytes) -> Packet:
        """Parse a packet. Fails for a wrong checksum."""
        source, target, tag = struct.unpack_from(">HHI", content)
        (checksum,) = struct.unpack_from("<I", content, 8)
        assert checksum == crc32c(content[:8] + bytes(4) + content[12:])
        return cls(source, target, tag, content[12])


def crc32c(content: bytes) -> int:
    """Return the checksum of RFC 9260, appendix A."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def raw_socket(namespace: int, family: socket.AddressFamily) -> socket.socket:
    with netns.entered(namespace):
        listener = socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_SCTP)
    listener.settimeout(20)
    return listener


def receive(link: socket.socket) -> tuple[Packet, str]:
    """Return the next packet and its sender; an IPv4 raw socket also receives the IP header."""
    content, sender = link.recvfrom(2048)
    start = (content[0] & 15) * 4 if link.family == socket.AF_INET else 0
    return Packet.decode(content[start:]), str(sender[0])


def test_the_checksum_is_the_standards() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    ("family", "host_address", "client"),
    [(socket.AF_INET, HOST_OUTER, CLIENT), (socket.AF_INET6, HOST_OUTER6, CLIENT6)],
    ids=["IPv4", "IPv6"],
)
def test_packets_are_forwarded_and_answered(
    host: Host, family: socket.AddressFamily, host_address: str, client: str
) -> None:
    host.connect_outside()
    pod = host.pod()
    publish(host, pod, {**WEB, "protocol": "sctp"})
    with raw_socket(pod.fd, family) as server, raw_socket(host.outside, family) as outside:
        outside.sendto(Packet(40000, 8080, 0, INIT).encode(), (host_address, 0))
        assert receive(server) == (Packet(40000, 80, 0, INIT), client)
        server.sendto(Packet(80, 40000, 0x1234, INIT_ACK).encode(), (client, 0))
        assert receive(outside) == (Packet(8080, 40000, 0x1234, INIT_ACK), host_address)
