"""A real nginx from Debian's packages as a docker-archive, built once into the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
from pathlib import Path

from cri_server.images import build
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
MERGED = ("bin", "lib", "lib64", "sbin")
PACKAGES = "nginx-light,busybox-static"


def archive() -> Path:
    """The archive's path; the image is `docker.io/library/nginx:latest`."""
    suite = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )["VERSION_CODENAME"]
    recipe = json.dumps([suite, FILES, LINKS, CONFIG, PACKAGES, 7])
    path = toolchain.cache() / "images" / f"nginx-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        base = temporary.with_suffix(".base.tar")
        _debian(base, suite)
        image = build.image([base.read_bytes(), _additions(base)], CONFIG)
        temporary.write_bytes(build.docker_archive({"docker.io/library/nginx:latest": image}))
        base.unlink()
        temporary.rename(path)
    return path


def _debian(out: Path, suite: str) -> None:
    """The packages' files, unpacked but not configured: their scripts want a whole system."""
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={PACKAGES}", suite, str(out)]
    subprocess.run(command, check=True, capture_output=True)


def _additions(base: Path) -> bytes:
    """What configuring the packages would have made. From Debian 13 on, /lib64 and its like are links of a whole system's."""
    folders = {"run": build.directory(), "var/lib/nginx": build.directory(), "tmp": build.directory(0o1777)}
    with tarfile.open(base) as archive:
        merged = not any(name.removeprefix("./").startswith("lib64") for name in archive.getnames())
    system = (
        {name: f"usr/{name}" for name in MERGED} | {"usr/bin/sh": "busybox"}
        if merged
        else {"bin/sh": "busybox"}
    )
    links = {name: build.symlink(target) for name, target in {**LINKS, **system}.items()}
    return build.layer({**FILES, **links, **folders}, parents=False)
