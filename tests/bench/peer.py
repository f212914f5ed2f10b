"""Runs the first peer: containerd with runc and the reference CNI plugins, in its own network
namespace."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cri_server.images.archives import build
from tests.support import toolchain
from tests.support.processes import Program, wait_until

PAUSE = "registry.k8s.io/pause:3.10"


class Containerd:
    """Runs containerd under `folder`; `socket` answers CRI after `start`."""

    def __init__(
        self, folder: Path, namespace: str, plugins: Path | None = None, mounts: str = ""
    ) -> None:
        """`namespace`: the network namespace in which containerd runs. `plugins`: a folder of CNI
        plugins to use instead of the reference plugins. `mounts`: the file of the mount namespace
        in which containerd runs, or "" for the present one."""
        self.folder, self.namespace, self.mounts = folder, namespace, mounts
        self.socket = folder / "containerd.sock"
        self.program = Program("containerd", folder)
        self.built = toolchain.peer()
        self._plugins = plugins or self.built / "cni"
        self._there = _groups()

    def launch(self) -> None:
        """Start containerd without waiting until it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_configuration()
        command = [f"{self.built}/bin/containerd", "-c", f"{self.folder}/config.toml"]
        environment = {"PATH": f"{self.built}/bin:{os.environ['PATH']}"}
        self.program.start([*enter(self.namespace, self.mounts), *command], environment=environment)

    def start(self, images: Sequence[Path], timeout_s: float = 30) -> None:
        """Start containerd and import `images` (docker-archives), one of them named like PAUSE."""
        self.launch()
        if not wait_until(lambda: self._ctr("version").returncode == 0, timeout_s):
            raise RuntimeError(f"containerd does not answer:\n{self.program.tail()}")
        for image in images:
            done = self._ctr("-n", "k8s.io", "images", "import", str(image))
            if done.returncode:
                raise RuntimeError(f"containerd does not import {image}: {done.stderr}")

    def runtime(self) -> str:
        """Return the OCI runtime's name and version."""
        return version_of(self.built / "bin/runc")

    def stop(self) -> None:
        """Stop containerd, whose pods must have been removed. Also remove the cgroup of all pods,
        which containerd leaves in each hierarchy."""
        self.program.stop()
        for group in _groups() - self._there:
            group.rmdir()

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [f"{self.built}/bin/ctr", "-a", str(self.socket), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    def _write_configuration(self) -> None:
        net = self.folder / "net.d"
        net.mkdir(exist_ok=True)
        network = bridge_network("peer", "10.88.0.0/16", self.folder / "leases")
        (net / "10-peer.conflist").write_text(json.dumps(network))
        runtime = "plugins.'io.containerd.cri.v1.runtime'"
        images = "plugins.'io.containerd.cri.v1.images'"
        (self.folder / "config.toml").write_text(
            f"""version = 3
root = "{self.folder}/root"
state = "{self.folder}/state"
[grpc]
  address = "{self.socket}"
[{runtime}]
  restrict_oom_score_adj = true
  disable_apparmor = true
[{runtime}.cni]
  bin_dirs = ["{self._plugins}"]
  conf_dir = "{net}"
[{runtime}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{runtime}.containerd.runtimes.runc.options]
  BinaryName = "{self.built}/bin/runc"
[{images}.registry]
  config_path = "{self.folder}/certs.d"
[{images}.pinned_images]
  sandbox = "{PAUSE}"
"""
        )


def enter(namespace: str, mounts: str) -> list[str]:
    """Return the words to put before a command to run it in the network namespace `namespace` and
    in the mount namespace of the file `mounts`. "" means the present namespace."""
    network = [f"--net=/run/netns/{namespace}"] if namespace else []
    words = [*network, *([f"--mount={mounts}"] if mounts else [])]
    # nsenter leaves /sys unchanged; `ip netns exec` would replace it.
    return ["nsenter", *words] if words else []


def version_of(program: Path) -> str:
    """Return the name and version of an OCI runtime, such as `crun 1.21`."""
    output = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout
    return output.splitlines()[0].replace(" version ", " ")


def bridge_network(name: str, subnet: str, leases: Path) -> dict[str, Any]:
    """Return a CNI network: a bridge (`name` with 0 at the end), host-local addresses, host
    ports."""
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(leases),
    }
    bridge = {
        "type": "bridge",
        "bridge": f"{name}0",
        "isGateway": True,
        "ipMasq": True,
        "ipam": ipam,
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return {"cniVersion": "1.0.0", "name": name, "plugins": plugins}


def _groups() -> set[Path]:
    """Return the cgroups `k8s.io` in the trees of cgroup v1 and v2."""
    return {
        group for place in ("k8s.io", "*/k8s.io") for group in Path("/sys/fs/cgroup").glob(place)
    }


def pause_archive(folder: Path) -> Path:
    """Make an image for the peer's sandboxes: our own pause program, as a docker-archive in
    `folder`."""
    program = (Path(__file__).parents[2] / "pyrunc/native/pause").read_bytes()
    image = build.image(
        [build.layer({"pause": build.LayerFile(program, mode=0o755)})], {"Entrypoint": ["/pause"]}
    )
    path = folder / "pause.tar"
    path.write_bytes(build.docker_archive({PAUSE: image}))
    return path
