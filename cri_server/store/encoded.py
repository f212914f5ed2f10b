"""Messages kept in their wire form: lists and statuses that kubelet asks for every second join
bytes instead of building.

On the wire a message is its fields one after the other, in any order, each with its tag, and a
message among them with its length (protobuf's encoding guide): a list's answer is a join of entries
that were encoded when they last changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyrunc.varint import varint

VARINT, LENGTH_DELIMITED = 0, 2


class CachedEncoding:
    """The wire form of one message about an object, made again when a fact that it was made of has
    changed."""

    __slots__ = ("_facts", "_wire")

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] | None = None
        self._wire = b""

    def get(self, facts: tuple[Any, ...], make: Callable[[], bytes]) -> bytes:
        """`facts` are all that can change; objects among them are replaced when they change, never
        altered."""
        if self._facts != facts:
            self._wire = make()
            self._facts = facts
        return self._wire


def tag(message: type[Any], field: str, kind: int = LENGTH_DELIMITED) -> bytes:
    """What a field of `message` begins with."""
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


def entry(begin: bytes, payload: bytes) -> bytes:
    """A message as the field whose tag is `begin`."""
    return begin + varint(len(payload)) + payload
