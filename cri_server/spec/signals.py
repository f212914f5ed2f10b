"""Converts stop signals between CRI's enum (whose numbers differ from the kernel's), an image's
text, names, and the kernel's numbers."""

from __future__ import annotations

import signal

from cri_server.api import api_pb2 as api
from pyrunc.errors import InvalidArgument

DEFAULT = "SIGTERM"
_PREFIX = "SIGNAL_"
_ALIASES = {"SIGCLD": "SIGCHLD", "SIGIOT": "SIGABRT"}


def stop_signal(requested: int, image: str) -> str:
    """Return the name of a container's stop signal: the request's, else the image's, else SIGTERM.
    Raises InvalidArgument for an unknown signal."""
    if requested:
        return from_cri(requested)
    return from_text(image) if image else DEFAULT


def from_cri(value: int) -> str:
    """Convert a value of CRI's enum to a signal's name: `SIGNAL_SIGRTMINPLUS1` to `SIGRTMIN+1`.
    Raises InvalidArgument for a number that the enum lacks."""
    try:
        name = api.Signal.Name(value).removeprefix(_PREFIX)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidArgument(f"unknown stop signal {value}") from None
    return name.replace("PLUS", "+").replace("MINUS", "-")


def to_cri(name: str) -> int:
    """Return the CRI enum value of a signal's name; SIGNAL_RUNTIME_DEFAULT for a name that the enum
    lacks."""
    word = _ALIASES.get(name, name).replace("+", "PLUS").replace("-", "MINUS")
    return dict(api.Signal.items()).get(_PREFIX + word, 0)


def from_text(text: str) -> str:
    """Return the full name of a signal given as `15`, `TERM`, `SIGTERM` or `SIGRTMIN+3`. Raises
    InvalidArgument for an unknown signal."""
    word = text.strip().upper()
    if word.isascii() and word.isdigit():
        return _named(int(word[:4]))
    name = word if word.startswith("SIG") else f"SIG{word}"
    number(name)
    return name


def number(name: str) -> int:
    """Return the number of the signal `name`, such as `SIGRTMIN+3`, on this architecture. Raises
    InvalidArgument for an unknown signal."""
    base, offset = _ALIASES.get(name, name), 0
    for sign in ("+", "-"):
        head, has_sign, tail = base.partition(sign)
        if has_sign:
            if head not in ("SIGRTMIN", "SIGRTMAX") or not (tail.isascii() and tail.isdigit()):
                raise InvalidArgument(f"unknown signal {name[:40]!r}")
            base, offset = head, int(sign + tail[:3])
    try:
        # SIGRTMIN is glibc's 34, not the kernel's 32 (nptl(7)); moby/sys/signal counts from 34 as
        # well.
        value = signal.Signals[base].value + offset
    except KeyError:
        raise InvalidArgument(f"unknown signal {name[:40]!r}") from None
    if not 1 <= value <= signal.SIGRTMAX:
        raise InvalidArgument(f"unknown signal {name[:40]!r}")
    return value


def _named(value: int) -> str:
    if signal.SIGRTMIN < value < signal.SIGRTMAX:
        return f"SIGRTMIN+{value - signal.SIGRTMIN}"
    try:
        return signal.Signals(value).name
    except ValueError:
        raise InvalidArgument(f"unknown signal {value}") from None
