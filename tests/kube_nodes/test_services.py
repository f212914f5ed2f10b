"""Tests Services: kube-proxy forwards their addresses to pods, also on another node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube.pods import Kube
from tests.kube_nodes.views import Hosts
from tests.support.cluster_proxy import Proxies
from tests.support.flannel import Flannel


@pytest.fixture(scope="module")
def proxies(flannel: Flannel) -> Iterator[Proxies]:
    running = Proxies(flannel.cluster)
    running.start()
    yield running
    running.stop()


def test_a_service_leads_to_the_pod_of_the_other_node(
    hosts: Hosts, kube: Kube, proxies: Proxies
) -> None:
    """A pod and its node both reach the other node's pod by the address of its Service."""
    for node, other in hosts.pairs():
        name = f"web{other.number}"
        kube("expose", "pod", name, "--port=8000", "--target-port=80")
        address = kube("get", "service", name, "-o", "jsonpath={.spec.clusterIP}").stdout
        page = f"{address}:8000/cgi-bin/who"
        kube.until(
            lambda a=address, n=node: a in n.output("nft list ruleset"), "kube-proxy's rules", 30
        )
        assert hosts.fetch(node, page) == f"from {hosts.address(node)} at {name}"
        assert f"at {name}" in node.output(f"timeout 10 busybox wget -qO- http://{page}")
