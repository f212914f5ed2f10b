"""Integers of any size as protobuf and HPACK write them: seven bits to a byte, the lowest first;
all but the last have the high bit."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A number that is not negative."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
