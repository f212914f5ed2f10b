"""The cluster that the suite runs on: two nodes with flannel, kube-proxy and CoreDNS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.kube_conformance import images, name_server
from tests.support import session, toolchain
from tests.support.cluster import Cluster
from tests.support.cluster_proxy import Proxies
from tests.support.flannel import Flannel


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Provide the running cluster, whose files are in `folder`; afterwards only the files
    remain."""
    toolchain.kubernetes()
    archives = images.archives()
    cluster = Cluster(folder, session.name("conf"), nodes=2)
    flannel, proxies = Flannel(cluster, "vxlan"), Proxies(cluster)
    try:
        for node in cluster.nodes:
            flannel.install(node)
        cluster.up(archives, network={})
        flannel.start()
        proxies.start()
        name_server.start(cluster)
        yield cluster
    finally:
        proxies.stop()
        flannel.stop()
        cluster.down()
