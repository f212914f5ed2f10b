"""Opens an unpacked image's files as one tree: a detached, read-only overlay of its layers, which
exists as long as its descriptor. A single layer is opened as it is.

The tree is mounted nowhere. Its content is hostile: resolve paths only beneath the descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyrunc.compile.image_mount import open_layers
from pyrunc.kernel.fd import closing_fd


@contextmanager
def merged(layers: Sequence[str | os.PathLike[str]]) -> Iterator[int]:
    """Open the merged tree of `layers`, top first, and yield a descriptor of its root, which is
    valid during the `with` block. Blocking. Raises KernelError, OSError."""
    paths = [os.fspath(layer) for layer in layers]
    # overlay(5) needs two layers when there is no upper one.
    if len(paths) == 1:
        root = os.open(paths[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        root = open_layers(paths)
    with closing_fd(root):
        yield root
