"""Tests that a checkpoint of containerd continues in a pod of ours: from its archive, and from
images that hold it."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import names
from cri_server.images.archives import build
from cri_server.images.formats import manifest as manifests
from tests.bench.peer import Containerd, pause_archive
from tests.cri.inner_registry import inside
from tests.cri.server_harness import IMAGE, RPC_TIMEOUT_S, Server
from tests.support import cri
from tests.support.oci_archives import manifest_of
from tests.support.processes import wait_until
from tests.vm.counting import WORKLOAD, config, goes_on, restore

pytestmark = pytest.mark.timeout(900)

NAMESPACE = "peer"
CHECKPOINT = "checkpoint/of-containerd:1"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the image that all containers of these tests use."""
    path = tmp_path_factory.mktemp("image") / "busybox.tar"
    path.write_bytes(build.docker_archive({IMAGE: build.busybox()}))
    return path


@pytest.fixture(scope="module")
def archive(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the checkpoint of a container that counts and that has written and removed files."""
    folder = tmp_path_factory.mktemp("containerd")
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)  # CRIU uses it
    peer = Containerd(folder / "peer", NAMESPACE)
    try:
        peer.start([image, pause_archive(folder)], timeout_s=180)
        with cri.connect(peer.socket) as client:
            yield _checkpoint(client, folder)
    finally:
        peer.stop()
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


def _checkpoint(client: cri.Client, folder: Path) -> Path:
    """Checkpoint a container over CRI and remove it; return the archive."""
    pod = api.PodSandboxConfig(
        metadata=api.PodSandboxMetadata(name="theirs", uid="theirs", namespace="default"),
        hostname="theirs", log_directory=str(folder), linux=api.LinuxPodSandboxConfig(),
    )  # fmt: skip
    sandbox = client.runtime.RunPodSandbox(
        api.RunPodSandboxRequest(config=pod), timeout=300
    ).pod_sandbox_id
    config = api.ContainerConfig(
        metadata=api.ContainerMetadata(name="c"),
        image=api.ImageSpec(image=IMAGE),
        command=["sh", "-c", WORKLOAD],
        log_path="c.log",
        linux=api.LinuxContainerConfig(),
    )
    config.linux.security_context.namespace_options.pid = api.CONTAINER
    request = api.CreateContainerRequest(pod_sandbox_id=sandbox, config=config, sandbox_config=pod)
    container = client.runtime.CreateContainer(request, timeout=300).container_id
    try:
        client.runtime.StartContainer(
            api.StartContainerRequest(container_id=container), timeout=300
        )
        assert wait_until(lambda: len((folder / "c.log").read_text().splitlines()) > 5, 120, 0.5)
        archive = folder / "theirs.tar"
        checkpoint_request = api.CheckpointContainerRequest(
            container_id=container, location=str(archive)
        )
        client.runtime.CheckpointContainer(checkpoint_request, timeout=300)
        return archive
    finally:
        client.runtime.StopPodSandbox(
            api.StopPodSandboxRequest(pod_sandbox_id=sandbox), timeout=300
        )
        client.runtime.RemovePodSandbox(
            api.RemovePodSandboxRequest(pod_sandbox_id=sandbox), timeout=300
        )


@pytest.mark.requirement("4.11.1")
def test_an_archive_of_containerd_is_restored(server: Server, archive: Path) -> None:
    with tarfile.open(archive) as tar:
        assert {"config.dump", "spec.dump", "rootfs-diff.tar", "checkpoint/inventory.img"} <= {
            name.removeprefix("./") for name in tar.getnames()
        }
    goes_on(server, restore(server, archive, config(server)))


@pytest.mark.parametrize("annotation", names.ANNOTATIONS)
def test_an_image_with_a_checkpoint_is_pulled_and_restored(
    server: Server, archive: Path, tmp_path: Path, annotation: str
) -> None:
    data, blobs = manifest_of(build.image([archive.read_bytes()]))
    data = json.dumps({**json.loads(data), "annotations": {annotation: "c"}}).encode()
    with inside(server, tmp_path) as registry:
        for blob in blobs.values():
            registry.put_blob(blob)
        registry.put_manifest(CHECKPOINT, data, manifests.OCI_MANIFEST)
        request = api.PullImageRequest(image=api.ImageSpec(image=f"{registry.host}/{CHECKPOINT}"))
        pulled = server.image.PullImage(request, timeout=RPC_TIMEOUT_S).image_ref
    # As kubelet does: from the id in the reply.
    container = restore(server, pulled, config(server))
    assert server.status(container).image.image == IMAGE
    goes_on(server, container)
    removed = api.RemoveImageRequest(image=api.ImageSpec(image=pulled))
    # with the same content as the next test's image
    server.image.RemoveImage(removed, timeout=RPC_TIMEOUT_S)


def test_an_image_with_a_checkpoint_built_by_podman_is_restored(
    server: Server, archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context/theirs.tar").write_bytes(archive.read_bytes())
    # As in Kubernetes' documentation, with buildah's code: `ADD` unpacks the archive.
    (tmp_path / "context/Containerfile").write_text("FROM scratch\nADD theirs.tar /\n")
    reference, saved = f"registry.test/{CHECKPOINT}", tmp_path / "image.tar"
    annotation = "io.kubernetes.cri-o.annotations.checkpoint.name=c"
    podman = ("podman", "--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "run"))
    try:
        subprocess.run(
            [
                *podman,
                "build",
                "-q",
                "--annotation",
                annotation,
                "-t",
                reference,
                str(tmp_path / "context"),
            ],
            check=True,
        )
        subprocess.run(
            [*podman, "save", "-q", "--format", "oci-archive", "-o", str(saved), reference],
            check=True,
        )
    finally:
        subprocess.run([*podman, "system", "reset", "--force"], check=True)
    server.load_image(saved.read_bytes())
    goes_on(server, restore(server, reference, config(server)))
