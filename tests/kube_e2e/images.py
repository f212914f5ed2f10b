"""Makes images in place of those of Kubernetes' own tests, with the same names and programs."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from cri_server.images.formats import manifest
from tests.support import busybox, debian, images, nginx, toolchain
from tests.support.oci_archives import descriptor, manifest_of
from tests.support.registry import archive_images

E2E = "registry.k8s.io/e2e-test-images"
# Packages with the other programs that specs run in agnhost.
TOOLS = "bash,curl,netcat-openbsd,iproute2,bind9-dnsutils,libc-bin"  # libc-bin: getent
AGNHOST_USERS = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/:/bin/false\n"
    ),
    "etc/group": (
        "root:x:0:\nuser-defined-in-image:x:1000:\n"
        "group-defined-in-image:x:50000:user-defined-in-image\nnogroup:x:65534:\n"
    ),
}


def archive() -> Path:
    """Return a docker-archive with all images, made once for each version of their content."""
    recipe = [
        toolchain.KUBERNETES,
        debian.suite(),
        Path(__file__).read_text(),
        _digest(images.PAUSE.read_bytes()),
        nginx.archive().name,
    ]
    return images.made_once("e2e", json.dumps(recipe), _all_of_them)


def _all_of_them() -> Mapping[str, BuiltImage]:
    """Return a dict: name -> image. The names are those of test/utils/image/manifest.go in
    `toolchain.KUBERNETES`."""
    shell = build.busybox(busybox.program())
    pause = images.pause(User="65535:65535")
    (web,) = archive_images(nginx.archive()).values()
    agnhost = _agnhost(shell, pause)
    program = (toolchain.e2e_helpers() / "nonewprivs").read_bytes()
    return {
        f"{E2E}/agnhost:2.63.0": agnhost,
        f"{E2E}/agnhost:2.55": agnhost,
        f"{E2E}/busybox:1.37.0-1": shell,
        f"{E2E}/glibc-dns-testing:2.0.0": shell,
        f"{E2E}/nginx:1.15-4": web,
        f"{E2E}/nginx:1.27-0": web,
        f"{E2E}/nonewprivs:1.4": images.with_files(
            shell, {"usr/local/bin/nnp": LayerFile(program, 0o6755)}, Cmd=["nnp"]
        ),
        f"{E2E}/nonroot:1.5": images.with_files(shell, {}, User="1234"),
        "registry.k8s.io/pause:3.10.2": pause,
    }


def _agnhost(shell: BuiltImage, pause: BuiltImage) -> BuiltImage:
    """Return agnhost with the tools that its Dockerfile installs, and with a registry's folder that
    has the image `pause`."""
    system = debian.unpacked(TOOLS)
    source = toolchain.kubernetes_source() / "test/images/agnhost/porter"
    own = {
        **_links(system),
        # Debian makes this link when it configures the package; busybox's nc has not all of its
        # options.
        "usr/local/bin/nc": build.symlink(f"/{_path_in(system, 'nc.openbsd')}"),
        **AGNHOST_USERS,
        "etc/nsswitch.conf": "hosts: files dns\n",
        "agnhost": LayerFile((toolchain.kubernetes() / "agnhost").read_bytes(), 0o755),
        "agnhost-2": build.symlink("agnhost"),
        "uploads": build.directory(),
        **{name: (source / name).read_bytes() for name in ("localhost.crt", "localhost.key")},
        **_fake_registry("pause", "testing", pause),
    }
    layers = [*shell.layers, system, build.layer(own)]
    return build.image(layers, {"Entrypoint": ["/agnhost"], "Cmd": ["pause"]})


def _path_in(layer: bytes, name: str) -> str:
    """Return the path of the only file with this name in the tar `layer`."""
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        (path,) = (path for path in archive.getnames() if path.endswith(f"/{name}"))
    return path.removeprefix("./")


def _links(system: bytes) -> build.Files:
    """Return the links of a merged /usr (/lib -> /usr/lib), except /bin, which is busybox's."""
    links = {name: node for name, node in debian.links_of_a_system(system).items() if name != "bin"}
    return {**links, "bin/bash": build.symlink("../usr/bin/bash")} if links else {}


def _fake_registry(name: str, tag: str, image: BuiltImage) -> build.Files:
    """Return an image as `agnhost fake-registry-server` serves it: files for the index, the
    manifest and the blobs, each named by its digest, and a file for each tag."""
    data, blobs = manifest_of(image, docker=True)
    platform = manifest.host_platform()
    entry = {
        **descriptor(data, manifest.DOCKER_MANIFEST),
        "platform": {"os": platform.os, "architecture": platform.architecture},
    }
    index = {"schemaVersion": 2, "mediaType": manifest.DOCKER_INDEX, "manifests": [entry]}
    index_data = json.dumps(index).encode()
    root = f"var/registry/{name}"
    return {
        f"{root}/manifests/{tag}": f"sha256:{_digest(index_data)}\n",
        **{
            _stored(f"{root}/manifests", _digest(content)): content
            for content in (data, index_data)
        },
        **{
            _stored(f"{root}/blobs", digest.removeprefix("sha256:")): blob
            for digest, blob in blobs.items()
        },
    }


def _stored(folder: str, digest: str) -> str:
    return f"{folder}/sha256/{digest[:2]}/{digest}/data"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    print(archive())
