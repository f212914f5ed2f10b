"""Tests pods on two machines: flannel's VXLAN between two guests, each with its kernel and systemd,
and a control plane. The tests are those of tests/kube_nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.pods import Kube, Manifest
from tests.kube_nodes.conftest import run_web_servers
from tests.kube_nodes.test_flannel import (  # noqa: F401
    test_a_pod_reaches_host_ports_of_the_other_node,
    test_links_of_pods_have_flannels_settings,
    test_nodes_reach_pods_of_other_nodes,
    test_packets_use_the_device_of_the_backend,
    test_pods_have_addresses_of_their_nodes_range,
    test_pods_reach_each_other_both_ways,
    test_the_kernels_tables_have_the_backends_routes,
)
from tests.kube_nodes.views import Hosts
from tests.support.guest_cluster import GuestCluster, GuestFlannel
from tests.vm.conftest import Boots

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(3600)]
PATIENCE_S = 300


class PatientKube(Kube):
    """Runs kubectl with longer time limits, for pods on emulated processors."""

    def ready(self, name: str, timeout_s: int = 0) -> Manifest:
        return super().ready(name, max(timeout_s, PATIENCE_S))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 0) -> Any:
        return super().until(condition, what, max(timeout_s, PATIENCE_S))


@pytest.fixture(scope="module")
def flannel(boots: Boots) -> Iterator[GuestFlannel]:
    """Provide two Ready nodes in guests, with flannel between them."""
    boots.stop()
    # A short path, because the length of socket paths is limited.
    with tempfile.TemporaryDirectory(prefix="guests-") as folder:
        cluster = GuestCluster(Path(folder))
        try:
            cluster.up()
            running = GuestFlannel(cluster)
            assert not any(cluster.is_ready(node) for node in cluster.nodes), (
                "Ready without a network"
            )
            running.start()
            yield running
        finally:
            cluster.down()


@pytest.fixture(scope="module")
def kube(flannel: GuestFlannel) -> Kube:
    """Provide kubectl in one namespace for all tests."""
    helper = PatientKube(flannel.cluster, "two-guests")
    helper.create_namespace()
    return helper


@pytest.fixture(scope="module")
def hosts(flannel: GuestFlannel, kube: Kube) -> Hosts:
    """Run a pod on each node, `web1` and `web2`, whose web server answers with the client's
    address."""
    return run_web_servers(flannel, kube)
