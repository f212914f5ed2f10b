"""Passes debug messages of the runtime to a listener (`--debug`). Without a listener a call costs
next to nothing. The standard library's logging is not used, because its import takes longer than a
whole command."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_listener: Callable[[str], object] | None = None


def listen(listener: Callable[[str], object] | None) -> None:
    """Send every later message to `listener`; None ends that."""
    global _listener
    _listener = listener


def on() -> bool:
    """Return whether debug messages have a listener. Callers check this before they build an
    expensive message."""
    return _listener is not None


def say(text: str, *values: object) -> None:
    """Send `text % values` to the listener. Without a listener nothing is formatted."""
    if _listener is not None:
        _listener(text % values if values else text)
