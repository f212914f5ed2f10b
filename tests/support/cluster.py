"""A real Kubernetes on pyrunc servers: a control plane and one or more nodes with kubelet, in
namespaces of this machine, with two registries on the first node.

`python -m tests.support.cluster up|down FOLDER` (`make kube`) starts or ends a cluster of one node.
Nodes have the addresses 198.18.77.1 and following, reached through a switch. `hosts.toml` makes the
registry at 198.18.77.1:5002 a mirror of docker.io and registry.k8s.io; the one at 127.0.0.1:5001 of
the first node requires a password.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import toolchain
from tests.support.cluster_control import ControlPlane
from tests.support.cluster_node import (
    LOCKED_REGISTRY,
    NODE_IP,
    OUTSIDE_IP,
    REGISTRY,
    Node,
    Switch,
    bridge_network,
)
from tests.support.kubectl import Kubectl
from tests.support.processes import Program, wait_until

__all__ = [
    "LOCKED_REGISTRY",
    "NODE_IP",
    "OUTSIDE_IP",
    "PASSWORD",
    "REGISTRY",
    "USER",
    "Cluster",
    "Node",
]

USER, PASSWORD = "puller", "s3cret-of-the-test"


class Cluster(Kubectl):
    """A cluster: a control plane, and nodes in network namespaces. The first node, `node`, also
    runs the control plane.

    - `folder`: the folder of all files.
    - `nodes`: the number of nodes. A single node shares this machine's mounts.
    - `kinds`: the class of each node, instead of `nodes`, if some have other servers than pyrunc.
    - `kubeconfig`: reaches the API server from outside of the nodes, too.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "pyrunc-kube",
        nodes: int = 1,
        kinds: Sequence[type[Node]] = (),
    ) -> None:
        self.folder = folder
        kinds = kinds or [Node] * nodes
        names = [name, *(f"{name}-{n}" for n in range(2, len(kinds) + 1))]
        self.nodes = [kind(folder / f"node{n}", names[n - 1], n) for n, kind in enumerate(kinds, 1)]
        for node in self.nodes:
            node.pods_group = f"/{node.name}"
        self.node = self.nodes[0]
        self.control = ControlPlane(folder, self.node)
        self.kubeconfig = self.control.kubeconfig
        self._switch = Switch(name)
        self.registries = {n: Program(n, folder / "log") for n in ("registry", "locked-registry")}
        self.programs = {**self.control.programs, "kubelet": self.node.kubelet, **self.registries}

    def up(
        self,
        images: Sequence[Path] = (),
        locked_images: Sequence[Path] = (),
        network: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the cluster; return when the nodes are Ready.

        `network`: the CNI configuration of the nodes.

        - None: a bridge with the pod CIDRs from kubelet
        - empty: no network. The nodes do not become Ready, and this does not wait for them.
        """
        self.bin = toolchain.kubernetes()
        self._make_nodes()
        self._start_registries(images, locked_images)
        for node in self.nodes:
            default = bridge_network(node.folder / "leases", ())
            node.write_configuration(default if network is None else network)
            node.start_server()
        self.control.make_certificates(self.nodes)
        self.control.start_storage(self.bin)
        self.wait_for("API server", self._api_server_is_ready, 300)
        self.control.start_controllers(self.bin)
        for node in self.nodes:
            self.start_kubelet(node)
        if network is None or network:
            self.await_nodes()

    def await_nodes(self, timeout_s: float = 300) -> None:
        """Wait until all nodes are Ready."""
        for node in self.nodes:
            self.wait_for(f"{node.host} Ready", lambda n=node: self.is_ready(n), timeout_s)  # type: ignore[misc]

    def down(self) -> None:
        """End the cluster and leave only files: no pods, mounts of kubelet, programs, network
        namespace or sockets."""
        for node in self.nodes:
            node.kubelet.stop()
        self.control.stop()
        for node in reversed(self.nodes):
            node.stop()
        for program in self.registries.values():
            program.stop()
        self._switch.remove()

    def start_kubelet(self, node: Node | None = None, **changes: object) -> None:
        """Start a node's kubelet, by default the first node's; also after a test has killed it."""
        node = node or self.node
        node.start_kubelet(
            self.bin / "kubelet", self.control.pki, self.control.node_kubeconfig(node), **changes
        )

    def restart_kubelet(self, **changes: object) -> None:
        """Kill the first node's kubelet and start it with `changes` to its configuration."""
        self.node.kubelet.stop(signal.SIGKILL)
        self.start_kubelet(None, **changes)

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait for `condition()`. After `timeout_s` raises RuntimeError with the last output of all
        programs."""
        if wait_until(condition, timeout_s, 0.25):
            return
        programs = {**self.programs}
        for node in self.nodes:
            programs |= {f"{node.host}: server": node.server, f"{node.host}: kubelet": node.kubelet}
        logs = "\n".join(f"--- {name}\n{program.tail(15)}" for name, program in programs.items())
        raise RuntimeError(f"{what}: not there after {timeout_s:.0f} s\n{logs}")

    def _make_nodes(self) -> None:
        """Make the folders, the switch and the nodes' namespaces."""
        for node in self.nodes:
            node.folder.mkdir(parents=True, exist_ok=True)
        self._switch.make()
        for node in self.nodes:
            node.make_network(self._switch)
        if len(self.nodes) > 1:
            for node in self.nodes:
                node.make_mounts([other.folder for other in self.nodes if other is not node])

    def _start_registries(self, images: Sequence[Path], locked_images: Sequence[Path]) -> None:
        for name, address, served, more in (
            ("registry", REGISTRY, images, []),
            ("locked-registry", LOCKED_REGISTRY, locked_images, ["--auth", f"{USER}:{PASSWORD}"]),
        ):
            host, _, port = address.rpartition(":")
            self.registries[name].start(
                self.node.inside(
                    sys.executable,
                    "-m",
                    "tests.support.registry",
                    "--address",
                    host,
                    "--port",
                    port,
                    "--root",
                    f"{self.folder}/{name}",
                    *more,
                    *map(str, served),
                ),
                environment={"PYTHONPATH": str(Path(__file__).parents[2])},
            )

    def _api_server_is_ready(self) -> bool:
        return self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0


def main(arguments: list[str]) -> None:
    """Start a cluster and print how to use it (`up FOLDER`), or end it and remove its folder (`down
    FOLDER`)."""
    if len(arguments) != 2 or arguments[0] not in ("up", "down"):
        sys.exit("usage: python -m tests.support.cluster up|down FOLDER")
    folder = Path(arguments[1]).absolute()
    cluster = Cluster(folder)
    if arguments[0] == "down":
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)
        return
    from tests.support import images
    from tests.support import nginx as nginx_image

    signal.signal(signal.SIGINT, signal.default_int_handler)
    busybox, nginx = images.busybox(), nginx_image.archive()
    try:
        cluster.up([busybox, nginx], [busybox])
    except BaseException:
        cluster.down()
        raise
    kubectl = toolchain.kubernetes() / "kubectl"
    print(
        f"The node is Ready. Try:\n  export KUBECONFIG={cluster.kubeconfig}\n  {kubectl} apply -f"
        " pod.yaml"
    )
    print(
        f"  {kubectl} create deploy nginx --image=nginx --replicas=3\n  {kubectl} get pods -o"
        " wide\nEnd it with: make kube-down"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
