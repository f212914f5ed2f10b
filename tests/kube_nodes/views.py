"""Reads the pods of the nodes, and the kernel's network tables in each node's namespace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from typing import Any

from tests.kube.pods import Kube, Manifest
from tests.support.cluster_node import Node
from tests.support.flannel import Flannel
from tests.support.guest_cluster import GuestFlannel, GuestNode

AnyNode = Node | GuestNode


@dataclass(frozen=True)
class Hosts:
    """The cluster with a web server's pod on each node. `pods`: name of a node -> its pod."""

    flannel: Flannel | GuestFlannel
    kube: Kube
    pods: dict[str, Manifest]

    @property
    def nodes(self) -> list[AnyNode]:
        return self.flannel.cluster.nodes

    def pairs(self) -> list[tuple[AnyNode, AnyNode]]:
        """Return both orders of the two nodes: (first, second) and (second, first)."""
        first, second = self.nodes
        return [(first, second), (second, first)]

    def address(self, node: AnyNode) -> str:
        return str(self.pods[node.host]["status"]["podIP"])

    def addresses(self, node: AnyNode) -> set[str]:
        """Return the pod's addresses of both families."""
        return {str(entry["ip"]) for entry in self.pods[node.host]["status"]["podIPs"]}

    def address6(self, node: AnyNode) -> str:
        """Return the pod's address of the second family."""
        first, second = (entry["ip"] for entry in self.pods[node.host]["status"]["podIPs"])
        assert first == self.address(node)
        return str(second)

    def subnet(self, node: AnyNode) -> IPv4Network:
        """Return the node's pod CIDR from the controller manager."""
        range_of_node = ip_network(self.flannel.cluster.pod_range(node))
        assert isinstance(range_of_node, IPv4Network)
        return range_of_node

    def fetch(self, node: AnyNode, url: str) -> str:
        """Request `url` from inside the node's pod; return the answer."""
        # Without -T, with which Debian's static wget crashes.
        return self.kube.sh(f"web{node.number}", f"timeout 10 wget -qO- http://{url}")


def links(node: AnyNode, *arguments: str) -> list[dict[str, Any]]:
    """Return the result of `ip link show` in the node."""
    return _table(node, "ip -d -s -j link show " + " ".join(arguments))


def link_names(node: AnyNode) -> set[str]:
    """Return the names of the node's network devices, from /proc."""
    lines = node.output("cat /proc/net/dev").splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines}


def ports(node: AnyNode, bridge: str = "cni0") -> list[str]:
    """Return the names of the network devices on the node's bridge."""
    return [link["ifname"] for link in links(node, "master", bridge)]


def routes(node: AnyNode) -> dict[str, dict[str, Any]]:
    """Return a dict: destination -> route of the node."""
    return {route["dst"]: route for route in _table(node, "ip -j route show")}


def forwarding(node: AnyNode, device: str) -> dict[str, str]:
    """Return the forwarding table of a VXLAN: hardware address -> far end of the tunnel."""
    entries = _table(node, f"bridge -j fdb show dev {device}")
    return {entry["mac"]: entry["dst"] for entry in entries if "dst" in entry}


def neighbours(node: AnyNode, device: str) -> dict[str, str]:
    """Return the node's neighbour table: IP address -> hardware address."""
    return {
        n["dst"]: n["lladdr"]
        for n in _table(node, f"ip -j neigh show dev {device}")
        if "lladdr" in n
    }


def leases(node: AnyNode) -> set[str]:
    """Return the addresses that host-local has leased in flannel's network."""
    names = node.output(f"find {node.folder}/leases/cbr0 -type f -printf '%f\\n'").split()
    return {name for name in names if name.startswith(("10.", "fd77:"))}


def _table(node: AnyNode, command: str) -> list[dict[str, Any]]:
    text = node.output(command)
    document: list[dict[str, Any]] = json.loads(text) if text.strip() else []
    return document
