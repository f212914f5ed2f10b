"""Tests power cuts: the results of answered calls are on disk, and unanswered calls leave nothing
permanent.

The server's root directory is an ext4 file system whose journal is not committed by time
(commit=300), so that the disk has only synced data.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server
from tests.support.disks import make_ext4, snapshot
from tests.support.processes import wait_until

OPTIONS = "loop,commit=300"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return make_ext4(tmp_path / "disk")


@pytest.fixture
def server(disk: Path) -> Iterator[Server]:
    network = {"builtin": ["10.88.0.0/16"]}
    with Server(
        network=False, settings={"network": network}, mount=["-o", OPTIONS, str(disk)]
    ) as server:
        server.load_image()
        yield server


@pytest.fixture
def cut_power(server: Server, disk: Path) -> Callable[[], None]:
    """Return a function that cuts the power: the server restarts on a copy of the synced disk, with
    another boot id."""

    def cut() -> None:
        copy = snapshot(disk, disk.with_name("after"))
        server.end_boot()
        subprocess.run(["umount", server.root], check=True)
        subprocess.run(["mount", "-o", OPTIONS, copy, server.root], check=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        for path in (p for p in server.root.rglob("*") if p.is_file() and "blobs" not in p.parts):
            content = path.read_bytes()
            if boot.encode() in content:
                path.write_bytes(content.replace(boot.encode(), b"another-boot"))
        server.start()

    return cut


def test_created_pods_are_listed_after_a_power_cut(
    server: Server, cut_power: Callable[[], None]
) -> None:
    pods = [server.run_pod() for _ in range(3)]
    config = server.container_config(metadata=api.ContainerMetadata(name="c", attempt=7))
    containers = [server.launch(pod, config) for pod in pods]
    cut_power()
    assert {pod.id: pod.state for pod in server.pods()} == dict.fromkeys(pods, api.SANDBOX_NOTREADY)
    listed = {c.id: (c.state, c.metadata.attempt) for c in server.containers()}
    assert listed == dict.fromkeys(containers, (api.CONTAINER_EXITED, 7))
    assert [
        tag
        for image in server.image.ListImages(api.ListImagesRequest()).images
        for tag in image.repo_tags
    ] == [IMAGE]
    server.output(server.launch(server.run_pod()), "true")
    server.remove_all()
    nothing_left(server)


def test_the_stop_of_a_pod_of_another_boot_is_recorded(
    server: Server, cut_power: Callable[[], None]
) -> None:
    pod = server.run_pod()
    cut_power()
    server.stop_pod(pod)
    assert json.loads((server.root / "sandboxes" / f"{pod}.json").read_text())["phase"] == "stopped"
    server.remove_pod(pod)


def test_an_interrupted_removal_is_finished_after_a_power_cut(
    server: Server, cut_power: Callable[[], None]
) -> None:
    pod = server.run_pod()
    server.launch(pod)
    server.remove_pod(pod)
    cut_power()
    server.remove_all()
    nothing_left(server)


def nothing_left(server: Server) -> None:
    """Check that no record, lease, damaged file or temporary file remains."""

    def left() -> list[Path]:
        return [
            path
            for folder in ("sandboxes", "containers", "network")
            for path in (server.root / folder).rglob("*")
            if not path.is_dir()
            # Files in `leaving` stay until their network devices disappear.
            and path.parent.name != "leaving"
            and not path.name.startswith(("lock", "last_"))
        ]

    # The server runs GC of the CNI plugins after its start. Only GC removes a lease that the power
    # cut has emptied.
    assert wait_until(lambda: not left(), timeout_s=10), left()
