"""That how a container ended is on disk before anyone hears of it."""

from __future__ import annotations

import sys

from pyrunc import atomic_file
from pyrunc.shim import messages


def write(ended: messages.Exit, directory: str) -> None:
    """Put the record into the container's folder. A failure is reported on stderr: the exit must be
    told all the same."""
    try:
        atomic_file.write_json(f"{directory}/{messages.EXIT_RECORD}", ended.to_fields())
    except OSError as error:
        print(f"pyrunc-shim: no exit record in {directory}: {error}", file=sys.stderr)
