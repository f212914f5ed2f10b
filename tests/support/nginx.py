"""A real nginx from Debian's packages as a docker-archive, built once into the cache folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

from tests.support import toolchain

FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nadm:x:4:\nwww-data:x:33:\nnogroup:x:65534:\n",
    "etc/nginx/sites-enabled/default": "server { listen 80 default_server; root /var/www/html; index index.nginx-debian.html; }\n",
    "var/www/html/index.nginx-debian.html": "<h1>Welcome to nginx!</h1>\n",
}
LINKS = {"var/log/nginx/access.log": "/dev/stdout", "var/log/nginx/error.log": "/dev/stderr"}
CONFIG = {
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "Cmd": ["nginx", "-g", "daemon off;"],
    "ExposedPorts": {"80/tcp": {}},
    "StopSignal": "SIGQUIT",
}
PACKAGES = "nginx-light,busybox-static"


def archive() -> Path:
    """The archive's path; the image is `docker.io/library/nginx:latest`."""
    suite = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )["VERSION_CODENAME"]
    recipe = json.dumps([suite, FILES, LINKS, CONFIG, PACKAGES, 4])
    path = toolchain.cache() / "images" / f"nginx-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        base = temporary.with_suffix(".base.tar")
        _debian(base, suite)
        _docker_archive(temporary, "docker.io/library/nginx:latest", [base.read_bytes(), _additions()])
        base.unlink()
        temporary.rename(path)
    return path


def _debian(out: Path, suite: str) -> None:
    """The packages' files, unpacked but not configured: their scripts want a whole system."""
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={PACKAGES}", suite, str(out)]
    subprocess.run(command, check=True, capture_output=True)


def _additions() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o644, len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in {**LINKS, "usr/bin/sh": "busybox"}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
        for name in ("run", "var/lib/nginx", "tmp"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(member)
    return buffer.getvalue()


def _docker_archive(out: Path, name: str, layers: list[bytes]) -> None:
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    config = json.dumps(
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": CONFIG,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{d}" for d in digests]},
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps(
        [{"Config": config_name, "RepoTags": [name], "Layers": [f"{d}/layer.tar" for d in digests]}]
    ).encode()
    with tarfile.open(out, "w") as tar:
        contents = {
            config_name: config,
            "manifest.json": manifest,
            **{f"{d}/layer.tar": b for d, b in zip(digests, layers, strict=True)},
        }
        for member_name, content in contents.items():
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
