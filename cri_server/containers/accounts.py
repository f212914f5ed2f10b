"""An image's /etc/passwd and /etc/group, read once per image through a detached read-only overlay of its layers.

No mount appears anywhere: the overlay lives as long as its descriptor. Paths are resolved inside it (RESOLVE_IN_ROOT), so
that a symlink in the image leads nowhere else; sizes are bounded, for the content is hostile.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Sequence

from cri_server.containers.spec.user import Accounts
from pyrunc.errors import KernelError
from pyrunc.kernel import mount
from pyrunc.kernel import path as paths

SIZE_LIMIT_BYTES = 4 << 20
CACHED_IMAGES = 256

_cache: dict[str, Accounts] = {}


async def read_accounts(image_id: str, layers: Sequence[str | os.PathLike[str]]) -> Accounts:
    """The accounts of an image whose unpacked layers are `layers`, top first; missing files mean none."""
    found = _cache.get(image_id)
    if found is None:
        found = await asyncio.to_thread(_read, [os.fspath(layer) for layer in layers])
        if len(_cache) >= CACHED_IMAGES:
            _cache.clear()
        _cache[image_id] = found
    return found


def _read(layers: list[str]) -> Accounts:
    root = _open_root(layers)
    try:
        return Accounts.parse(_content(root, "etc/passwd"), _content(root, "etc/group"))
    finally:
        os.close(root)


def _open_root(layers: list[str]) -> int:
    """overlay(5) needs two layers when there is no upper one; a single one is opened as it is."""
    if len(layers) == 1:
        return os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return mount.open_overlay(layers)


def _content(root: int, name: str) -> bytes:
    try:
        descriptor = paths.open_in_root(root, name, os.O_RDONLY | os.O_NONBLOCK)
    except KernelError:
        return b""
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.read(descriptor, SIZE_LIMIT_BYTES) if regular else b""
    finally:
        os.close(descriptor)
