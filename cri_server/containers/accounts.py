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
# A parsed file of short lines takes ten times its size, so larger files are not cached.
CACHED_IMAGES, CACHED_BYTES = 256, 1 << 16

_cache: dict[str, Accounts] = {}


async def read_accounts(image_id: str, layers: Sequence[str | os.PathLike[str]]) -> Accounts:
    """Return the users and groups of an image. `layers`: its unpacked layers, top first. A missing
    file counts as empty."""
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
    """Return the content of the file `name` in the image's `root`: at most `SIZE_LIMIT_BYTES`,
    whole lines only. Empty if it is not a regular file."""
    try:
        descriptor = paths.open_regular_in_root(root, name)
    except KernelError:
        return b""
    with closing_fd(descriptor):
        content = os.read(descriptor, SIZE_LIMIT_BYTES)
    return content if len(content) < SIZE_LIMIT_BYTES else content[: content.rfind(b"\n") + 1]
