"""Integers of any size as protobuf and HPACK encode them: seven bits in a byte, the lowest first.
All bytes but the last have the high bit."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Encode a number that is not negative."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
