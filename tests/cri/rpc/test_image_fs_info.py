"""ImageFsInfo: the disk space and inodes that images and writable layers use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import wait_until


@pytest.mark.requirement("5.5.1", "1.b.9", "10.1.16")
def test_all_of_each_file_system_is_set(server: Server) -> None:
    answer = server.image.ImageFsInfo(api.ImageFsInfoRequest())
    for usage in (*answer.image_filesystems, *answer.container_filesystems):
        assert usage.timestamp > 10**18 and Path(usage.fs_id.mountpoint).is_dir()
        assert usage.HasField("used_bytes") and usage.HasField("inodes_used")
    assert len(answer.image_filesystems) == len(answer.container_filesystems) == 1
    assert answer.image_filesystems[0].used_bytes.value > 500_000


@pytest.mark.requirement("1.2")
def test_an_empty_store_is_reported() -> None:
    with Server(network=False) as server:
        (usage,) = server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems
        assert usage.HasField("used_bytes") and usage.timestamp


@pytest.mark.requirement("5.5.1", "10.1.12")
def test_the_container_file_system_counts_writable_layers(server: Server) -> None:
    """Writable layers are counted apart from images. A reply has sizes from earlier walks over the
    files, so no call waits for a walk."""

    def containers() -> api.FilesystemUsage:
        return server.image.ImageFsInfo(api.ImageFsInfoRequest()).container_filesystems[0]

    assert containers().HasField("used_bytes") and containers().used_bytes.value == 0
    container = server.launch(server.run_pod())
    server.output(container, "dd", "if=/dev/zero", "of=/file", "bs=1M", "count=3")
    images = server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems[0]
    request = api.ContainerStatsRequest(container_id=container)

    def grown() -> bool:
        """Return whether the sizes of the layer and of the file system include the file."""
        # kubelet asks for the statistics again and again. A layer is measured again only after a
        # pause.
        layer = server.runtime.ContainerStats(request).stats.writable_layer
        return min(layer.used_bytes.value, containers().used_bytes.value) >= 3 << 20

    assert wait_until(grown, 60)
    assert (
        containers().inodes_used.value > 0
        and containers().fs_id.mountpoint == images.fs_id.mountpoint
    )
    assert (
        server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems[0].used_bytes
        == images.used_bytes
    )
    server.remove_container(container)
    assert containers().used_bytes.value == 0
