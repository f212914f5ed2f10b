"""Reads an image's /etc/passwd and /etc/group, once per image, through a detached read-only overlay
of its layers.

Paths are resolved inside the overlay (RESOLVE_IN_ROOT): a symlink of the image cannot lead to a
file of the host. Sizes are bounded, because the content is hostile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from cri_server.images.store.merged import merged
from cri_server.spec.user import Accounts
from pyrunc.errors import KernelError
from pyrunc.kernel import path as paths
from pyrunc.kernel.fd import closing_fd

# CRI-O read such a file of any size into memory (CVE-2025-4437).
SIZE_LIMIT_BYTES = 1 << 20
# parsed, a file of short lines takes ten times its size: larger ones are not cached
CACHED_IMAGES, CACHED_BYTES = 256, 1 << 16

_cache: dict[str, Accounts] = {}


async def read_accounts(image_id: str, layers: Sequence[str | os.PathLike[str]]) -> Accounts:
    """Return the accounts of an image whose unpacked layers are `layers`, top first; a missing file
    has none."""
    if image_id in _cache:
        return _cache[image_id]
    accounts, size = await asyncio.to_thread(_read, [os.fspath(layer) for layer in layers])
    if size <= CACHED_BYTES:
        if len(_cache) >= CACHED_IMAGES:
            _cache.clear()
        _cache[image_id] = accounts
    return accounts


def _read(layers: list[str]) -> tuple[Accounts, int]:
    with merged(layers) as root:
        passwd, group = _read_limited(root, "etc/passwd"), _read_limited(root, "etc/group")
    return Accounts.parse(passwd, group), len(passwd) + len(group)


def _read_limited(root: int, name: str) -> bytes:
    """Read a file up to the limit, cut after its last whole line; empty if there is no regular
    file."""
    try:
        descriptor = paths.open_regular_in_root(root, name)
    except KernelError:
        return b""
    with closing_fd(descriptor):
        content = os.read(descriptor, SIZE_LIMIT_BYTES)
    return content if len(content) < SIZE_LIMIT_BYTES else content[: content.rfind(b"\n") + 1]
