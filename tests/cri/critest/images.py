"""Makes the images that critest uses: they have the original names and the files that critest
reads, but no bytes of the original images."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile, symlink
from cri_server.images.formats.manifest import host_platform
from tests.support import nginx
from tests.support.registry import archive_images

HOSTS = ("registry.k8s.io", "k8s.gcr.io", "gcr.io")
E2E = "registry.k8s.io/e2e-test-images"
STAGING = "gcr.io/k8s-staging-cri-tools"
USERS = {
    "uid": "1002",
    "username": "www-data",
    "uid-group": "1003:1004",
    "username-group": "www-data:1004",
}
HOST_NETWORK_PORT = 12003

# Prints its user: it belongs to root and has the set-user-ID bit.
WHO = """
#include <stdio.h>
#include <unistd.h>
int main(void) { printf("Effective uid: %d\\n", geteuid()); return 0; }
"""


# Debian's busybox has neither.
PGREP = '#!/bin/sh\nexec pidof "$1"\n'
IPCS = "#!/bin/sh\nexec cat /proc/sysvipc/shm\n"


def all_of_them() -> Mapping[str, BuiltImage]:
    """Return a dict: name -> image, of all images that critest uses."""
    busybox = _with(
        build.busybox(),
        {
            "bin/ls": LayerFile(
                build.BUSYBOX.read_bytes(), 0o755
            ),  # a file that can be masked alone
            "bin/pgrep": LayerFile(PGREP.encode(), 0o755),
            "bin/ipcs": LayerFile(IPCS.encode(), 0o755),
        },
    )
    web = _nginx(80)
    marked = {
        name: _with(busybox, {name: name})
        for name in ("latest", "digest", "1", "2", "3", "tag", "tags")
    }
    return {
        f"{E2E}/busybox:1.29-2": busybox,
        f"{E2E}/nginx:1.14-2": web,
        f"{E2E}/httpd:2.4.39-4": _httpd(busybox),
        f"{E2E}/nonewprivs:1.3": build.image(
            [build.layer({"who": LayerFile(_who(), 0o4755)})], {"Entrypoint": ["/who"]}
        ),
        "registry.k8s.io/pause:3.9": _with(busybox, {"pause": "pause"}),
        "k8s.gcr.io/pause:3.9": _with(busybox, {"pause": "pause"}),
        f"{STAGING}/hostnet-nginx-{host_platform().architecture}:latest": _nginx(HOST_NETWORK_PORT),
        f"{STAGING}/test-image-latest:latest": marked["latest"],
        f"{STAGING}/test-image-tag:test": marked["tag"],
        f"{STAGING}/test-image-tag:all": marked["tag"],
        **{f"{STAGING}/test-image-{n}:latest": marked[n] for n in "123"},
        **{f"{STAGING}/test-image-tags:{n}": marked["tags"] for n in "123"},
        **{
            f"{STAGING}/test-image-user-{n}:latest": _with(busybox, {}, User=u)
            for n, u in USERS.items()
        },
        f"{STAGING}/test-image-predefined-group:latest": _with(
            busybox,
            {
                "etc/passwd": (
                    "root:x:0:0:root:/root:/bin/sh\ndefault-user:x:1000:1000::/home:/bin/sh\n"
                ),
                "etc/group": (
                    "root:x:0:\ndefault-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n"
                ),
            },
            User="1000",
        ),
    }


def _with(base: BuiltImage, files: build.Files, **config: str) -> BuiltImage:
    layers = [*base.layers, build.layer(files)] if files else base.layers
    return build.image(layers, {"Cmd": ["sh"], **config})


def _httpd(busybox: BuiltImage) -> BuiltImage:
    """Return an image with a web server that reports its start on stderr."""
    page = {"www/index.html": "<html><body><h1>It works!</h1></body></html>\n"}
    start = "echo httpd: serving >&2; exec httpd -f -p 80 -h /www"
    return build.image([*busybox.layers, build.layer(page)], {"Cmd": ["sh", "-c", start]})


def _nginx(port: int) -> BuiltImage:
    (image,) = archive_images(nginx.archive()).values()
    site = (
        f"server {{ listen {port} default_server; root /var/www/html; index"
        " index.nginx-debian.html; }\n"
    )
    tools = {
        f"usr/local/bin/{name}": symlink("/bin/busybox")
        for name in ("cat", "pidof", "sleep", "hostname")
    }
    files = {"etc/nginx/sites-enabled/default": site, "var/run": symlink("/run"), **tools}
    return build.image([*image.layers, build.layer(files)], nginx.CONFIG)


def _who() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/who"
        subprocess.run(
            ["gcc", "-O", "-static", "-x", "c", "-", "-o", out],
            input=WHO.encode(),
            check=True,
            capture_output=True,
        )
        return Path(out).read_bytes()
