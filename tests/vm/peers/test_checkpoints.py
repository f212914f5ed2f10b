"""A checkpoint that containerd has written goes on in a pod of ours."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images import build
from tests.bench.peer import Containerd, pause_archive
from tests.cri.server_harness import IMAGE, Server
from tests.support import cri
from tests.support.processes import wait_until
from tests.vm.inside.test_server_checkpoint import WORKLOAD, config, restore, wait_beyond

pytestmark = pytest.mark.timeout(900)

NAMESPACE = "peer"


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server() as server:
        server.load_image()
        yield server


@pytest.fixture
def server(module_server: Server) -> Iterator[Server]:
    yield module_server
    module_server.remove_all()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of all containers here, by one name."""
    path = tmp_path_factory.mktemp("image") / "busybox.tar"
    path.write_bytes(build.docker_archive({IMAGE: build.busybox()}))
    return path


@pytest.fixture(scope="module")
def of_containerd(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The archive of a container that counts and that has written and removed files."""
    folder = tmp_path_factory.mktemp("containerd")
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)  # CRIU tries it
    peer = Containerd(folder / "peer", NAMESPACE)
    try:
        peer.start([image, pause_archive(folder)], timeout_s=180)
        with cri.connect(peer.socket) as client:
            yield _checkpoint(client, folder)
    finally:
        peer.stop()
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def _checkpoint(client: cri.Client, folder: Path) -> Path:
    """Made over CRI, of a container that is gone afterwards."""
    pod = api.PodSandboxConfig(
        metadata=api.PodSandboxMetadata(name="theirs", uid="theirs", namespace="default"),
        hostname="theirs", log_directory=str(folder), linux=api.LinuxPodSandboxConfig(),
    )  # fmt: skip
    sandbox = client.runtime.RunPodSandbox(api.RunPodSandboxRequest(config=pod), timeout=300).pod_sandbox_id
    wanted = api.ContainerConfig(
        metadata=api.ContainerMetadata(name="c"), image=api.ImageSpec(image=IMAGE), command=["sh", "-c", WORKLOAD], log_path="c.log",
        linux=api.LinuxContainerConfig(),
    )  # fmt: skip
    wanted.linux.security_context.namespace_options.pid = api.CONTAINER
    request = api.CreateContainerRequest(pod_sandbox_id=sandbox, config=wanted, sandbox_config=pod)
    container = client.runtime.CreateContainer(request, timeout=300).container_id
    try:
        client.runtime.StartContainer(api.StartContainerRequest(container_id=container), timeout=300)
        assert wait_until(lambda: len((folder / "c.log").read_text().splitlines()) > 5, 120, 0.5)
        archive = folder / "theirs.tar"
        asked = api.CheckpointContainerRequest(container_id=container, location=str(archive))
        client.runtime.CheckpointContainer(asked, timeout=300)
        return archive
    finally:
        client.runtime.StopPodSandbox(api.StopPodSandboxRequest(pod_sandbox_id=sandbox), timeout=300)
        client.runtime.RemovePodSandbox(api.RemovePodSandboxRequest(pod_sandbox_id=sandbox), timeout=300)


def goes_on(server: Server, container: str) -> None:
    """It counts from where it was, and has what it had written and not what it had removed."""
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


def test_an_archive_of_containerd(server: Server, of_containerd: Path) -> None:
    with tarfile.open(of_containerd) as found:
        assert {"config.dump", "spec.dump", "rootfs-diff.tar", "checkpoint/inventory.img"} <= {
            name.removeprefix("./") for name in found.getnames()
        }
    goes_on(server, restore(server, of_containerd, config(server)))
