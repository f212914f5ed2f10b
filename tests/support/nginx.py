"""Makes an image of a real nginx from Debian's packages, as a docker-archive that is built once
into the cache folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage
from tests.support import debian, images

FILES = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n"
        "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    ),
    "etc/group": "root:x:0:\nadm:x:4:\nwww-data:x:33:\nnogroup:x:65534:\n",
    "etc/nginx/sites-enabled/default": (
        "server { listen 80 default_server; root /var/www/html; index index.nginx-debian.html; }\n"
    ),
    "var/www/html/index.nginx-debian.html": "<h1>Welcome to nginx!</h1>\n",
}
LINKS = {
    "var/run": "/run",
    "var/log/nginx/access.log": "/dev/stdout",
    "var/log/nginx/error.log": "/dev/stderr",
}
CONFIG = {
    "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    "Cmd": ["nginx", "-g", "daemon off;"],
    "ExposedPorts": {"80/tcp": {}},
    "StopSignal": "SIGQUIT",
}
PACKAGES = "nginx-light,busybox-static"


def archive() -> Path:
    """Return the path of the archive; its image is `docker.io/library/nginx:latest`."""
    recipe = json.dumps([debian.suite(), FILES, LINKS, CONFIG, PACKAGES, 7])
    return images.made_once("nginx", recipe, _image)


def _image() -> Mapping[str, BuiltImage]:
    base = debian.unpacked(PACKAGES)
    return {"docker.io/library/nginx:latest": build.image([base, _additions(base)], CONFIG)}


def _additions(base: bytes) -> bytes:
    """Return a layer with the files that an installation would make when it configures the
    packages."""
    folders = {
        "run": build.directory(),
        "var/lib/nginx": build.directory(),
        "tmp": build.directory(0o1777),
    }
    system = debian.links_of_a_system(base)
    shell = {"usr/bin/sh" if system else "bin/sh": build.symlink("busybox")}
    links = {name: build.symlink(target) for name, target in LINKS.items()}
    return build.layer({**FILES, **links, **system, **shell, **folders}, parents=False)
