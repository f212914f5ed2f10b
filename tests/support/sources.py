"""Lists the source files of the project's packages."""

from __future__ import annotations

import os
from pathlib import Path


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below `folder`, sorted."""
    # Unlike `Path.rglob`, os.walk passes over a folder that is removed meanwhile: a test that
    # builds the program makes one in `pyrunc/native`.
    files = [
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    ]
    return sorted(files)
