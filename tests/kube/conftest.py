"""Provides one cluster for all Kubernetes tests. Leaks are checked after its end, because kubelet
collects dead pods late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.pods import Kube
from tests.support import images, ledger, nginx, session
from tests.support.cluster import Cluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = Path(tmp_path_factory.mktemp("kube"))
    archives = [images.busybox(), nginx.archive()]
    with ledger.nothing_left("the cluster"):
        running = Cluster(folder, session.name("kube"))
        try:
            running.up(archives, [archives[0]])
            yield running
        finally:
            running.down()


@pytest.fixture
def kube(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """Provide kubectl in a namespace of the test, which is deleted afterwards with everything in
    it."""
    helper = Kube(cluster, request.node.name)
    helper.create_namespace()
    yield helper
    helper.delete_namespace()
