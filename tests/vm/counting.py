"""Provides tests of checkpoints by the real CRIU with a container that counts, and a server that
restores from archives and from images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.processes import wait_until

WORKLOAD = (
    "mkdir /data && echo kept > /data/file && rm /etc/group && echo changed >> /etc/passwd;"
    "i=0; while :; do i=$((i+1)); echo $i; echo $i > /next; mv /next /count; sleep 0.05; done"
)


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server(settings={"containers": {"restore_images": True}}) as started:
        started.load_image()
        yield started


def config(server: Server, script: str = WORKLOAD, **changes: Any) -> api.ContainerConfig:
    return server.container_config(["sh", "-c", script], **changes)


def count(server: Server, container: str) -> int:
    # A script that writes /count in place leaves it empty for a moment.
    return int(server.output(container, "sh", "-c", "cat /count || echo 0") or 0)


def wait_beyond(server: Server, container: str, number: int) -> None:
    assert wait_until(lambda: count(server, container) > number, 60, 0.1)


def checkpoint(server: Server, container: str, location: Path) -> Path:
    request = api.CheckpointContainerRequest(
        container_id=container, location=str(location), timeout=300
    )
    server.runtime.CheckpointContainer(request, timeout=330)
    assert location.stat().st_mode & 0o7777 == 0o600
    return location


def restore(server: Server, reference: Path | str, config: api.ContainerConfig) -> str:
    """Restore a container from the archive or image `reference`, in a new pod with another address;
    return the container's id."""
    config.image.image = str(reference)
    return server.launch(server.run_pod(), config)


def goes_on(server: Server, container: str) -> None:
    """Assert that the workload continues to count, has the files that it has written and lacks
    those that it has removed. Stops the container."""
    assert wait_until(lambda: server.log_lines(container), 60, 0.5)
    first = int(server.log_lines(container)[0])
    assert first > 5
    wait_beyond(server, container, first)
    assert server.output(container, "cat", "/data/file") == "kept\n"
    assert "changed" in server.output(container, "cat", "/etc/passwd")
    assert "group" not in server.output(container, "ls", "/etc")
    assert server.status(container).state == api.CONTAINER_RUNNING
    server.stop_container(container)
    assert server.status(container).exit_code == 137
