"""What the runtime does, told step by step to who asked for it (`--debug`). Without a listener a
call costs nothing to speak of.

Not the standard library's logging, whose import alone takes longer than a whole command.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_listener: Callable[[str], object] | None = None


def listen(listener: Callable[[str], object] | None) -> None:
    """From now on `listener` gets every text; None ends that."""
    global _listener
    _listener = listener


def on() -> bool:
    """Whether anybody listens, for texts that cost something to make."""
    return _listener is not None


def say(text: str, *values: object) -> None:
    """Tell the listener `text % values`; without one nothing is worded."""
    if _listener is not None:
        _listener(text % values if values else text)
