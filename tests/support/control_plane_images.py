"""Makes the images that `kubeadm init` needs on its node, from the programs that the toolchain
builds. They have the names that this kubeadm demands, and no content of the original images."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from tests.support import debian, images, toolchain

# The programs that kube-proxy runs, and the names that Debian gives them when it configures the
# packages.
PROXY_TOOLS = "iptables,nftables,kmod"
PROXY_LINKS = [
    f"usr/sbin/{family}{command}"
    for family in ("iptables", "ip6tables")
    for command in ("", "-save", "-restore")
]


def archive() -> Path:
    """Return a docker-archive with all images, made once for each version of their content."""
    recipe = [
        image_names(),
        debian.suite(),
        Path(__file__).read_text(),
        hashlib.sha256(images.PAUSE.read_bytes()).hexdigest(),
    ]
    return images.made_once("control-plane", json.dumps(recipe), _all_of_them)


def image_names() -> list[str]:
    """Return the names of the images that kubeadm lists."""
    command = [
        str(toolchain.kubeadm()),
        "config",
        "images",
        "list",
        "--kubernetes-version",
        toolchain.KUBERNETES,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _all_of_them() -> Mapping[str, BuiltImage]:
    """Return all images by name. Raises KeyError when kubeadm lists an image that this module
    cannot make."""
    programs = toolchain.kubernetes()
    images_by_program = {
        **{
            name: _of(programs / name)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
        },
        "kube-proxy": _proxy(),
        "coredns": _of(toolchain.coredns(), Entrypoint=["coredns"]),
        "pause": images.pause(),
    }
    return {
        name: images_by_program[name.rpartition("/")[2].partition(":")[0]] for name in image_names()
    }


def _of(program: Path, **config: object) -> BuiltImage:
    """Return an image with `program` in /usr/local/bin."""
    return images.of_program(program, f"usr/local/bin/{program.name}", **config)


def _proxy() -> BuiltImage:
    system = debian.unpacked(PROXY_TOOLS)
    own = {
        **debian.links_of_a_system(system),
        "usr/local/bin/kube-proxy": LayerFile(toolchain.kube_proxy().read_bytes(), 0o755),
        **{name: build.symlink("xtables-nft-multi") for name in PROXY_LINKS},
    }
    return build.image([system, build.layer(own)])
