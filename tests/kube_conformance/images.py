"""Makes the images that the conformance suite needs in addition to those of tests/kube_e2e, and the
image of the cluster's name server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage
from tests.kube_e2e import images
from tests.support import toolchain
from tests.support.images import made_once, of_program
from tests.support.registry import archive_images

NAME_SERVER = f"registry.k8s.io/coredns/coredns:{toolchain.COREDNS}"
ETCD = "registry.k8s.io/etcd:3.6.8-0"
# Specs read the picture's name and the system's name; they do not need the pictures.
PICTURES = ("nautilus", "kitten")


def archives() -> list[Path]:
    """Return two docker-archives, made once for each version of their content: the images of
    tests/kube_e2e, and those of this module."""
    base = images.archive()
    recipe = (
        f"{base.name} {toolchain.COREDNS} {toolchain.SAMPLE_APISERVER} {toolchain.ETCD}"
        f" {Path(__file__).read_text()}"
    )
    return [base, made_once("conformance", recipe, lambda: _all_of_them(archive_images(base)))]


def _all_of_them(base: Mapping[str, BuiltImage]) -> dict[str, BuiltImage]:
    agnhost = base[f"{images.E2E}/agnhost:2.63.0"]
    etcd = _program(toolchain.kubernetes() / "etcd", "usr/local/bin/etcd")
    return {
        # With the C library's resolver, which agnhost's tools bring.
        f"{images.E2E}/glibc-dns-testing:2.0.0": build.image(agnhost.layers, {"Cmd": ["sh"]}),
        f"{images.E2E}/sample-apiserver:1.29.2": _program(
            toolchain.sample_apiserver(), "sample-apiserver"
        ),
        ETCD: etcd,
        NAME_SERVER: _program(toolchain.coredns(), "coredns"),
        **{f"{images.E2E}/{name}:1.8": picture(agnhost, name) for name in PICTURES},
    }


def _program(path: Path, name: str) -> BuiltImage:
    return of_program(path, name, Entrypoint=[f"/{name}"])


def picture(agnhost: BuiltImage, name: str) -> BuiltImage:
    """Return a web server's image with a file that says which picture it is, nautilus or kitten."""
    files = {
        "data.json": f'{{"image": "{name}.jpg"}}\n',
        f"{name}.jpg": name,
        "etc/os-release": 'NAME="in place of Alpine Linux"\n',
    }
    config = {"Entrypoint": ["/agnhost"], "Cmd": ["test-webserver"]}
    return build.image([*agnhost.layers, build.layer(files)], config)
