"""Provides one cluster of two nodes with flannel between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.pods import Kube, Manifest, pod, shell
from tests.kube_nodes.views import AnyNode, Hosts
from tests.support import images, ledger, session
from tests.support.cluster import Cluster
from tests.support.flannel import Flannel
from tests.support.guest_cluster import GuestFlannel

BUILD_TIMEOUT_S = 1200

_WEB = (
    "mkdir -p /www/cgi-bin && cd /www && printf '#!/bin/sh\\necho; echo from $REMOTE_ADDR at"
    " $(hostname)\\n' > cgi-bin/who && chmod +x cgi-bin/who && head -c 300000 /dev/urandom > big &&"
    " sha256sum big > sum && httpd -p 0.0.0.0:80 -h /www && exec httpd -f -p [::]:81 -h /www"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the long timeout."""
    # The first test waits for the builds of Kubernetes and flannel.
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))


def web_server(node: AnyNode) -> Manifest:
    """Return the manifest of the pod `webN` of node N; its web server answers with the client's
    address."""
    return pod(f"web{node.number}", shell(_WEB), nodeName=node.host)


def run_web_servers(flannel: Flannel | GuestFlannel, kube: Kube) -> Hosts:
    """Run a pod `webN` on each node; return the nodes with their pods."""
    nodes = flannel.cluster.nodes
    kube.apply(*(web_server(node) for node in nodes))
    return Hosts(flannel, kube, {node.host: kube.ready(f"web{node.number}") for node in nodes})


@pytest.fixture(scope="package", params=["vxlan", pytest.param("host-gw", marks=pytest.mark.slow)])
def flannel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Flannel]:
    """Provide a running cluster of two nodes whose pod network is flannel's."""
    with ledger.nothing_left("the cluster"):
        cluster = Cluster(Path(tmp_path_factory.mktemp("nodes")), session.name("nodes"), nodes=2)
        running = Flannel(cluster, request.param)
        try:
            for node in cluster.nodes:
                running.install(node)
            cluster.up([images.busybox()], network={})
            assert not any(cluster.is_ready(node) for node in cluster.nodes), (
                "Ready without a network"
            )
            running.start()
            yield running
        finally:
            running.stop()
            cluster.down()


@pytest.fixture(scope="package")
def kube(flannel: Flannel) -> Iterator[Kube]:
    """Provide kubectl in one namespace for all tests."""
    helper = Kube(flannel.cluster, f"flannel-{flannel.backend}")
    helper.create_namespace()
    yield helper
    helper.delete_namespace()


@pytest.fixture(scope="package")
def hosts(flannel: Flannel, kube: Kube) -> Hosts:
    """Run a pod on each node, `web1` and `web2`, whose web server answers with the client's
    address."""
    return run_web_servers(flannel, kube)
