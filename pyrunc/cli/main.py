"""The entry point of `pyrunc`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    from pyrunc.cli.fast import run

    code = run(sys.argv[1:])
    try:
        if sys.stdout is not None:
            # Flushed here, so that a full disk or a closed pipe still changes the exit code.
            sys.stdout.flush()
    except OSError:
        os._exit(code or 1)
    return code


if __name__ == "__main__":
    sys.exit(main())
