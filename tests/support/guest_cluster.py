"""Two guests as one cluster: a cable between them, the control plane on the first, and real flannel
with VXLAN as the pods' network.

The classes have the interfaces of `cluster.Cluster` and `flannel.Flannel`, so that the same checks
run on both kinds of cluster.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import flannel, guest_disk, guest_node, images
from tests.support.authority import Authority
from tests.support.guest import Guest, Link, free_port
from tests.support.kubectl import Kubectl
from tests.support.processes import wait_until

ADDRESSES = ("198.18.78.1", "198.18.78.2")
FOLDER = Path("/var/lib/node")
PROGRAMS = "/opt/flannel"
PATIENCE_S = 900.0  # both guests are emulated, each by one thread
FLANNELD = f"""set -e
mkdir -p {PROGRAMS} {FOLDER}/flannel /opt/cni/bin
mount -o ro /dev/disk/by-label/flannel {PROGRAMS}
cp {PROGRAMS}/flannel /opt/cni/bin/
cat >{FOLDER}/flannel/net-conf.json
systemd-run -q --unit flanneld --setenv NODE_NAME=NODE -p Restart=always -p RestartSec=2 {PROGRAMS}/flanneld \\
  --kube-subnet-mgr --kubeconfig-file /etc/kubernetes/node.conf --net-config-path {FOLDER}/flannel/net-conf.json \\
  --subnet-file {FOLDER}/flannel/subnet.env --iface eth1 --ip-masq
"""  # noqa: E501


class Unit:
    """A systemd unit of a guest."""

    def __init__(self, guest: Guest, name: str) -> None:
        self._guest, self._name = guest, name

    def tail(self, lines: int = 30) -> str:
        """Return the end of the unit's log."""
        return self._guest.ssh(
            f"journalctl --no-pager -o cat -n {lines} -u {self._name}", check=False
        ).stdout.decode()


class GuestNode:
    """A guest as node 1 or 2 of the cluster. `folder` is a path in the guest."""

    folder = FOLDER

    def __init__(
        self, number: int, sockets: Path, disks: Iterable[Path], forward: dict[int, int]
    ) -> None:
        self.number, self.host, self.address = number, f"node{number}", ADDRESSES[number - 1]
        link = Link(sockets / str(number), sockets / str(3 - number), f"52:54:00:77:00:0{number}")
        self.guest = Guest(memory_mib=3072, disks=[*disks], link=link, forward=forward)
        self.server, self.kubelet, self.flanneld = (
            Unit(self.guest, n) for n in ("pyrunc-cri", "kubelet", "flanneld")
        )

    def output(self, command: str) -> str:
        """Run a command in the guest; return its output. Raises an error when it fails."""
        return self.guest.ssh(command).stdout.decode()

    def run(self, command: str, text: str) -> None:
        """Run a command in the guest with `text` as its input."""
        self.guest.ssh(command, stdin=text.encode())

    def has(self, name: str) -> bool:
        """Return whether the file `name` of the node's folder exists and is not empty."""
        return self.guest.ssh(f"test -s {self.folder}/{name}", check=False).returncode == 0

    def boot(self) -> None:
        """Start the guest, copy the project to it, and configure its second network card."""
        self.guest.start()
        self.guest.push_project()
        self.output(f"ip addr add {self.address}/24 dev eth1 && ip link set eth1 up")

    def provision(self, authority: Path) -> None:
        """Make the guest a node of the cluster, without a network for pods."""
        settings = {"NODE": self.host, "NODE_ADDRESS": self.address, "POD_NETWORK": "none"}
        if self.number > 1:
            settings["API_SERVER"] = ADDRESSES[0]
        guest_node.provision(
            self.guest, settings=settings, authority=authority, timeout_s=PATIENCE_S
        )


class GuestCluster(Kubectl):
    """A cluster of two guests. `folder` is for certificates and sockets."""

    kubectl_timeout_s = 300.0

    def __init__(self, folder: Path) -> None:
        self.folder, self.kubeconfig = folder, folder / "kubeconfig"
        self._port = free_port()
        disks = [guest_disk.kubernetes(), guest_disk.flannel()]
        self.nodes = [
            GuestNode(n, folder, disks, {self._port: 6443} if n == 1 else {}) for n in (1, 2)
        ]
        self.node = self.nodes[0]

    def up(self) -> None:
        """Boot both guests and make them nodes."""
        images.busybox()  # built before both guests need it
        authority = Authority(self.folder)
        authority.make()
        authority.sign("admin", "/O=system:masters/CN=admin")
        authority.write_kubeconfig(self.kubeconfig, "admin", f"127.0.0.1:{self._port}")
        # In parallel: each guest occupies one processor here.
        self._on_each(lambda node: node.boot())
        self._on_each(lambda node: node.provision(self.folder))

    def down(self) -> None:
        """Power off both guests."""
        self._on_each(lambda node: node.guest.stop())

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        """Wait for `condition()`. After `timeout_s` raises RuntimeError with the last log lines of
        the units."""
        if wait_until(condition, timeout_s, 1.0):
            return
        units = [
            (f"{n.host}: {u}", getattr(n, u))
            for n in self.nodes
            for u in ("server", "kubelet", "flanneld")
        ]
        logs = "\n".join(f"--- {name}\n{unit.tail(15)}" for name, unit in units)
        raise RuntimeError(f"{what}: not there after {timeout_s:.0f} s\n{logs}")

    def _on_each(self, action: Callable[[GuestNode], None]) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            for done in [threads.submit(action, node) for node in self.nodes]:
                done.result()


class GuestFlannel:
    """flannel on the nodes of a GuestCluster, as a systemd unit."""

    backend = "vxlan"

    def __init__(self, cluster: GuestCluster) -> None:
        self.cluster = cluster

    def start(self) -> None:
        """Start the daemons when their nodes have pod CIDRs, write the nodes' CNI configuration,
        and wait until the nodes are Ready."""
        for node in self.cluster.nodes:
            has_range = functools.partial(self.cluster.pod_range, node)
            self._wait(f"{node.host}'s range", has_range)
            settings = json.dumps(flannel.daemon_settings(self.backend))
            node.run(FLANNELD.replace("NODE_NAME=NODE", f"NODE_NAME={node.host}"), settings)
        for node in self.cluster.nodes:
            has_file = functools.partial(node.has, "flannel/subnet.env")
            self._wait(f"flannel's range on {node.host}", has_file)
            there = "/etc/cni/net.d"
            node.run(
                f"cat >{there}/new && mv {there}/new {there}/10-flannel.conflist",
                json.dumps(flannel.pod_network(FOLDER)),
            )
        for node in self.cluster.nodes:
            self._wait(f"{node.host} Ready", lambda n=node: self.cluster.is_ready(n))  # type: ignore[misc]

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        self.cluster.wait_for(what, condition, PATIENCE_S)
