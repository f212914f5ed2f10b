"""Runs kube-proxy, which implements the addresses of Services by nftables, on a cluster's nodes."""

from __future__ import annotations

from tests.support import toolchain
from tests.support.cluster import Cluster
from tests.support.cluster_control import POD_RANGE
from tests.support.processes import Program


class Proxies:
    """A kube-proxy for each node. The rules end with the node's network namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self._program = cluster, toolchain.kube_proxy()
        self._running = {
            node.host: Program("kube-proxy", node.folder / "log") for node in cluster.nodes
        }
        cluster.programs |= {
            f"{host}: kube-proxy": program for host, program in self._running.items()
        }

    def start(self) -> None:
        """Start a kube-proxy in each node's namespaces."""
        for node in self.cluster.nodes:
            self._running[node.host].start(
                node.inside(
                    str(self._program),
                    "--kubeconfig",
                    str(self.cluster.control.node_kubeconfig(node)),
                    "--proxy-mode",
                    "nftables",
                    "--hostname-override",
                    node.host,
                    "--cluster-cidr",
                    POD_RANGE,
                    # 0: conntrack's limits, which belong to the machine, stay unchanged
                    "--conntrack-max-per-core",
                    "0",
                )
            )

    def stop(self) -> None:
        """End the kube-proxies."""
        for program in self._running.values():
            program.stop()
