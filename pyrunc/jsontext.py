"""JSON without importing `json`: that module brings `re` and `enum`, 8 ms, more than a whole `pyrunc state` may cost.

The scanner and the encoder are the C halves of the standard library's own module; what they cannot do (a broken text, a float
that is not finite) is handed to `json`, which words the error. Texts are compact and ASCII; surrogate escapes survive.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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


_scan: Callable[[str, int], tuple[Any, int]] | None = None
_encode: Callable[[object, int], tuple[str, ...]] | None = None


def _load() -> None:
    """Not before it is needed: a shared object cannot be in the snapshot from which `pyrunc` starts (cli/front.c)."""
    global _scan, _encode
    import _json

    _scan = _json.make_scanner(_Scanning)  # type: ignore[arg-type]
    _encode = _json.make_encoder(
        None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, False
    )


def loads(text: str | bytes) -> Any:
    """The value of a JSON text (UTF-8 when bytes; surrogate escapes for what is not). Raises ValueError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogateescape")
    if _scan is None:
        _load()
    assert _scan is not None
    start = len(text) - len(text.lstrip(WHITE))
    try:
        value, end = _scan(text, start)
    except (
        StopIteration,
        SystemError,
    ):  # the latter where the scanner wants an exception of a module that is not there
        return _words_of_the_standard_library(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text[end:].strip(WHITE):
        return _words_of_the_standard_library(text)
    return value


def dumps(value: object) -> str:
    """A compact ASCII text. Raises TypeError for what JSON cannot hold, RecursionError for a circle."""
    if _encode is None:
        _load()
    assert _encode is not None
    return "".join(_encode(value, 0))


def _words_of_the_standard_library(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not a JSON value")
