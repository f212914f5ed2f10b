"""Caches encoded protobuf messages, so that lists and statuses are joined from cached bytes.

An encoded message is the sequence of its encoded fields, in any order; a nested message is a field
with its length (protobuf's encoding guide). So the reply to a list call can be joined from entries
that were encoded when they last changed. kubelet lists every second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyrunc.varint import varint

VARINT, LENGTH_DELIMITED = 0, 2


class CachedEncoding:
    """Caches one encoded message, and encodes it again after the values that it depends on have
    changed."""

    __slots__ = ("_facts", "_wire")

    def __init__(self) -> None:
        self._facts: tuple[Any, ...] | None = None
        self._wire = b""

    def get(self, facts: tuple[Any, ...], make: Callable[[], bytes]) -> bytes:
        """Return the cached bytes; if `facts` differ from those of the last call, cache and return
        the result of `make`.

        `facts`: all values that the message depends on. Objects among them must be immutable.
        """
        if self._facts != facts:
            self._wire = make()
            self._facts = facts
        return self._wire


def tag(message: type[Any], field: str, kind: int = LENGTH_DELIMITED) -> bytes:
    """Return the encoded tag of the field `field` of `message`, with the wire type `kind`."""
    # From the descriptor, so that a number follows the .proto file of the API's version.
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


def entry(begin: bytes, payload: bytes) -> bytes:
    """Encode a field that is a nested message. `begin`: the field's encoded tag; `payload`: the
    encoded message."""
    return begin + varint(len(payload)) + payload
