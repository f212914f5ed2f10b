"""Provides one cluster for all tests of this folder."""

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
    # Not after each test, because kubelet collects dead pods late.
    with ledger.nothing_left("the cluster"):
        running = Cluster(folder, session.name("kube"))
        try:
            running.up(archives, [archives[0]])
            yield running
        finally:
            running.down()


@pytest.fixture
def kube(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kube]:
    """Provide kubectl in a new namespace, which is deleted after the test."""
    helper = Kube(cluster, request.node.name)
    helper.create_namespace()
    yield helper
    helper.delete_namespace()
