"""Images for tests: busybox of this machine as an archive in the cache folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cri_server.images import build
from tests.support import toolchain


def busybox(name: str = build.BUSYBOX_NAME) -> Path:
    """A docker-archive of the machine's static busybox called `name`, made once."""
    built = build.busybox()
    key = hashlib.sha256(f"{built.id} {name}".encode()).hexdigest()[:12]
    path = toolchain.cache() / "images" / f"busybox-{key}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build.busybox_archive(path, name)
    return path
