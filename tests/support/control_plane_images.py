"""The images that `kubeadm init` wants on its node, made here from the programs that the toolchain builds: the names that this
kubeadm asks for, none of the originals' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cri_server.images import build
from cri_server.images.build import BuiltImage, Node
from tests.support import debian, toolchain

PAUSE = Path(__file__).parents[2] / "pyrunc/native/pause"
# What kube-proxy runs, and the names that Debian gives it when the packages are configured.
PROXY_TOOLS = "iptables,nftables,kmod"
PROXY_LINKS = [
    f"usr/sbin/{family}{command}"
    for family in ("iptables", "ip6tables")
    for command in ("", "-save", "-restore")
]


def archive() -> Path:
    """A docker-archive with all of them, made once for each version of what is in them."""
    recipe = [
        wanted(),
        debian.suite(),
        Path(__file__).read_text(),
        hashlib.sha256(PAUSE.read_bytes()).hexdigest(),
    ]
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    path = toolchain.cache() / "images" / f"control-plane-{key}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(build.docker_archive(_all_of_them()))
        temporary.rename(path)
    return path


def wanted() -> list[str]:
    """The names, as kubeadm lists them."""
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
    """Name -> image. Raises KeyError for a name that is not known here."""
    programs = toolchain.kubernetes()
    made = {
        **{
            name: _of(programs / name)
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "etcd")
        },
        "kube-proxy": _proxy(),
        "coredns": _of(toolchain.coredns(), Entrypoint=["coredns"]),
        "pause": build.image(
            [build.layer({"pause": Node(PAUSE.read_bytes(), 0o755)})], {"Entrypoint": ["/pause"]}
        ),
    }
    return {name: made[name.rpartition("/")[2].partition(":")[0]] for name in wanted()}


def _of(program: Path, **config: object) -> BuiltImage:
    """One static program on the path, and a folder for what it writes meanwhile."""
    files = {
        f"usr/local/bin/{program.name}": Node(program.read_bytes(), 0o755),
        "tmp": build.directory(0o1777),
    }
    return build.image([build.layer(files)], config)


def _proxy() -> BuiltImage:
    system = debian.unpacked(PROXY_TOOLS)
    own = {
        **debian.links_of_a_system(system),
        "usr/local/bin/kube-proxy": Node(toolchain.kube_proxy().read_bytes(), 0o755),
        **{name: build.symlink("xtables-nft-multi") for name in PROXY_LINKS},
    }
    return build.image([system, build.layer(own)])
