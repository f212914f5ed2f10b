"""An image's files as one tree: a detached, read-only overlay of its unpacked layers, which lives
as long as its descriptor.

No mount appears anywhere. What is in the tree is hostile: resolve paths beneath the descriptor
only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyrunc.compile.sources import open_layers


@contextmanager
def merged(layers: Sequence[str | os.PathLike[str]]) -> Iterator[int]:
    """The root's descriptor, for a block; `layers` top first. Blocking. Raises KernelError,
    OSError."""
    root = _open([os.fspath(layer) for layer in layers])
    try:
        yield root
    finally:
        os.close(root)


def _open(layers: list[str]) -> int:
    """overlay(5) needs two layers when there is no upper one; a single one is opened as it is."""
    if len(layers) == 1:
        return os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return open_layers(layers)
