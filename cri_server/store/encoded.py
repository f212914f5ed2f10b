"""Caches of encoded protobuf messages, from which lists and statuses are joined.

An encoded message is its fields one after the other, in any order, each with its tag, and nested
messages with their length (protobuf's encoding guide). So the reply to a list call is the join of
entries that were encoded when they last changed: kubelet lists every second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyrunc.varint import varint

VARINT, LENGTH_DELIMITED = 0, 2


class CachedEncoding:
    """Caches an encoded message, and encodes it again when the values that it depends on have
    changed."""

    __slots__ = ("_facts", "_wire")

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] | None = None
        self._wire = b""

    def get(self, facts: tuple[Any, ...], make: Callable[[], bytes]) -> bytes:
        """Return the cached bytes, or the result of `make` if `facts` differ from the last call's.

        `facts`: all values that the message depends on; objects among them must be immutable.
        """
        if self._facts != facts:
            self._wire = make()
            self._facts = facts
        return self._wire


def tag(message: type[Any], field: str, kind: int = LENGTH_DELIMITED) -> bytes:
    """Return the encoded tag of a field of `message`."""
    # From the descriptor, so that a number follows the .proto file of the API's version.
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


def entry(begin: bytes, payload: bytes) -> bytes:
    """Encode a nested message as the field with the tag `begin`."""
    return begin + varint(len(payload)) + payload
