"""Messages in the shim's log, which is its standard error."""

from __future__ import annotations

import sys

from pyrunc.errors import VISIBLE


def warn(*messages: str) -> None:
    """Write a line to the shim's log for each message."""
    for message in messages:
        print(f"pyrunc-shim: {message.translate(VISIBLE)}", file=sys.stderr)
