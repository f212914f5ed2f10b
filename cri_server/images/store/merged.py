"""Shows an unpacked image's files as one tree: a detached, read-only overlay of its layers, which
lives as long as its descriptor.

It is mounted nowhere. The tree's content is hostile: resolve paths beneath the descriptor only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyrunc.compile.sources import open_layers
from pyrunc.kernel.fd import closing_fd


@contextmanager
def merged(layers: Sequence[str | os.PathLike[str]]) -> Iterator[int]:
    """Provide a descriptor of the tree's root for the block; `layers` top first. Blocking. Raises
    KernelError, OSError."""
    with closing_fd(_open([os.fspath(layer) for layer in layers])) as root:
        yield root


def _open(layers: list[str]) -> int:
    """Open the layers. overlay(5) needs two layers when there is no upper one, so a single layer is
    opened directly."""
    if len(layers) == 1:
        return os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return open_layers(layers)
