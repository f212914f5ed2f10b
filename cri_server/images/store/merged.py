"""Opens an unpacked image's files as one tree: a detached, read-only overlay of its layers, which
exists as long as its descriptor. A single layer is opened as it is.

The tree is mounted nowhere. Its content is hostile: resolve paths only beneath the descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pyrunc.compile.image_mount import open_layers
from pyrunc.kernel.fd import closing_fd


def merged(layers: Sequence[str | os.PathLike[str]]) -> closing_fd:
    """Open the merged tree of `layers`, top first; return a context manager for the descriptor of
    its root. Blocking. Raises KernelError, OSError."""
    paths = [os.fspath(layer) for layer in layers]
    # overlay(5) needs two layers when there is no upper one.
    if len(paths) == 1:
        return closing_fd(os.open(paths[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    return closing_fd(open_layers(paths))
