"""Messages in the shim's log, which is its standard error."""

from __future__ import annotations

import sys

from pyrunc.errors import VISIBLE


def warn(*messages: str) -> None:
    """Write a line to the shim's log for each message. A line that cannot be written, because the
    disk is full for example, is lost."""
    try:
        for message in messages:
            print(f"pyrunc-shim: {message.translate(VISIBLE)}", file=sys.stderr)
    except OSError:
        pass
