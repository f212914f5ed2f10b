"""Converts builtin values and JSON to typed values: msgspec's `convert` and `decode`, made
thread-safe.

msgspec 0.22 collects a type's fields at its first use, and stores the incomplete result on the type
before it evaluates the annotations. Another thread that uses the type meanwhile crashes with
SIGSEGV. So a lock protects the first use of each type.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_lock = threading.Lock()
_prepared: set[Any] = set()


def convert(value: Any, kind: type[T]) -> T:
    """Convert builtin values to `kind`. Raises msgspec.ValidationError."""
    _prepare(kind)
    return msgspec.convert(value, kind)


def decode(content: bytes | str, kind: type[T]) -> T:
    """Decode JSON to `kind`. Raises msgspec.DecodeError, the base of msgspec.ValidationError."""
    _prepare(kind)
    return msgspec.json.decode(content, type=kind)


def _prepare(kind: Any) -> None:
    if kind in _prepared:
        return
    with _lock:
        msgspec.json.Decoder(kind)
        _prepared.add(kind)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's members as a dict. This function is an `object_pairs_hook` for json.
    Raises ValueError for a key that occurs twice: JSON parsers do not agree which of the two values
    counts."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"key {key!r} occurs twice")
        fields[key] = value
    return fields
