"""A server that reports version 0.0.9; started as `python -m tests.cri.other_version serve …`."""

from __future__ import annotations

import pyrunc

pyrunc.__version__ = "0.0.9"

if __name__ == "__main__":
    from cri_server.cli.main import main

    main()
