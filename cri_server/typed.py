"""Values of types with fields from JSON and the like: msgspec's `convert` and `decode`, for
threads.

msgspec 0.22 learns a type's fields when it first meets it, and notes on the type what it has so far
before it looks at the fields' types. That runs Python code (it evaluates annotations), so another
thread may come in between, finds the unfinished note, and the process ends by SIGSEGV. Therefore
one thread at a time meets a type first.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_meeting = threading.Lock()
_met: set[Any] = set()


def convert(value: Any, kind: type[T]) -> T:
    """The `kind` that the builtin values say. Raises msgspec.ValidationError."""
    _meet(kind)
    return msgspec.convert(value, kind)


def decode(content: bytes | str, kind: type[T]) -> T:
    """The `kind` that the JSON says. Raises msgspec.DecodeError, of which msgspec.ValidationError
    is one."""
    _meet(kind)
    return msgspec.json.decode(content, type=kind)


def _meet(kind: Any) -> None:
    if kind in _met:
        return
    with _meeting:
        msgspec.json.Decoder(kind)
        _met.add(kind)
