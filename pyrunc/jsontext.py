"""Reads and writes JSON without importing `json`, which imports `re` and `enum` and takes 8 ms,
more than a whole `pyrunc state`.

The scanner and the encoder are the C functions of the standard library. A text that the scanner
refuses is passed to `json`, which raises the error. Written texts are compact and ASCII. Surrogate
escapes are kept.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Scan = Callable[[str, int], tuple[Any, int]]
    Encode = Callable[[object, int], tuple[str, ...]]

WHITE = " \t\n\r"


class _Scanning:
    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    memo: dict[str, str] = {}  # noqa: RUF012 (the scanner keeps its keys here and clears it)

    @staticmethod
    def parse_constant(name: str) -> float:
        raise ValueError(f"{name} is not JSON")


_halves: tuple[Scan, Encode] | None = None


def load() -> ModuleType:
    """Import and return the C module `_json`. In the snapshot a faster function replaces this one
    (accelerate/snapshot.py)."""
    import _json

    return _json


def _load() -> tuple[Scan, Encode]:
    """Return the scanner and the encoder of the module `_json`, and store them for later calls."""
    global _halves
    # Not at import: the heap that `pyrunc` starts from (cli/front.c) cannot hold objects of an
    # extension module's .so file.
    _json = load()
    _halves = (
        _json.make_scanner(_Scanning),
        _json.make_encoder(
            None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, False
        ),
    )
    return _halves


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text. Bytes are decoded as UTF-8; invalid bytes become surrogate
    escapes. Raises ValueError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    scan, _ = _halves or _load()
    start = len(text) - len(text.lstrip(WHITE))
    try:
        value, end = scan(text, start)
    except (StopIteration, SystemError):
        # SystemError: the scanner looks for json.JSONDecodeError, and `json` is not imported.
        return _load_with_standard_library(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text[end:].strip(WHITE):
        return _load_with_standard_library(text)
    return value


def dumps(value: object) -> str:
    """Return `value` as compact ASCII JSON. Raises TypeError for a type that JSON lacks, ValueError
    for a float that is not finite, RecursionError for a cycle."""
    _, encode = _halves or _load()
    return "".join(encode(value, 0))


def _load_with_standard_library(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not a JSON value")
