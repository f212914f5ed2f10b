"""An image's /etc/passwd and /etc/group, read once per image through a detached read-only overlay
of its layers.

Paths are resolved inside it (RESOLVE_IN_ROOT), so that a symlink in the image leads nowhere else;
sizes are bounded, for the content is hostile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from cri_server.images.merged import merged
from cri_server.spec.user import Accounts
from pyrunc.errors import KernelError
from pyrunc.kernel import path as paths

SIZE_LIMIT_BYTES = 1 << 20
# a file of short lines takes ten times its size when it is parsed
CACHED_IMAGES, CACHED_BYTES = 256, 1 << 16

_cache: dict[str, Accounts] = {}


async def read_accounts(image_id: str, layers: Sequence[str | os.PathLike[str]]) -> Accounts:
    """The accounts of an image whose unpacked layers are `layers`, top first; missing files mean
    none."""
    if image_id in _cache:
        return _cache[image_id]
    found, size = await asyncio.to_thread(_read, [os.fspath(layer) for layer in layers])
    if size <= CACHED_BYTES:
        if len(_cache) >= CACHED_IMAGES:
            _cache.clear()
        _cache[image_id] = found
    return found


def _read(layers: list[str]) -> tuple[Accounts, int]:
    with merged(layers) as root:
        passwd, group = _content(root, "etc/passwd"), _content(root, "etc/group")
    return Accounts.parse(passwd, group), len(passwd) + len(group)


def _content(root: int, name: str) -> bytes:
    """What fits into the limit, up to the last whole line."""
    try:
        descriptor = paths.open_regular_in_root(root, name)
    except KernelError:
        return b""
    try:
        content = os.read(descriptor, SIZE_LIMIT_BYTES)
    finally:
        os.close(descriptor)
    return content if len(content) < SIZE_LIMIT_BYTES else content[: content.rfind(b"\n") + 1]
