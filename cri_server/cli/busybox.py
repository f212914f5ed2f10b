"""A busybox image made from this host's static busybox, for a first pod on a machine that reaches no registry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

from pyrunc.errors import NotFound

PROGRAM = Path("/bin/busybox")
REFERENCE = "docker.io/library/busybox:latest"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS = ("bin", "etc", "home", "root", "tmp", "var")
FILES = {
    "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nwww:x:33:33::/home/www:/bin/sh\n",
    "etc/group": b"root:x:0:\nwww:x:33:\nextra:x:50:www\n",
}


def archive(reference: str = REFERENCE) -> bytes:
    """A docker-archive of one image named `reference`. Raises NotFound when the host has no busybox."""
    if not PROGRAM.exists():
        raise NotFound(f"{PROGRAM}: no such program (Debian: busybox-static)")
    layer = _layer()
    config = {
        "architecture": ARCHITECTURES.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "FROM_IMAGE=yes"], "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    content = json.dumps(config).encode()
    name = f"{hashlib.sha256(content).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": ["layer.tar"]}]
    result = io.BytesIO()
    with tarfile.open(fileobj=result, mode="w") as tar:
        _add(tar, name, content)
        _add(tar, "layer.tar", layer)
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    return result.getvalue()


def _layer() -> bytes:
    listing = subprocess.run([str(PROGRAM), "--list"], capture_output=True, text=True, check=True).stdout
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in FOLDERS:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(entry)
        _add(tar, "bin/busybox", PROGRAM.read_bytes(), 0o755)
        for applet in listing.split():
            if applet != "busybox":
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
        for name, content in FILES.items():
            _add(tar, name, content)
    return layer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
