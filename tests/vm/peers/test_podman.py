"""Tests that checkpoints of podman with runc continue in a pod of ours."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.images.archives import build
from tests.cri.server_harness import IMAGE, Server
from tests.support import toolchain
from tests.support.processes import wait_until
from tests.vm.counting import WORKLOAD, config, goes_on, restore

pytestmark = pytest.mark.timeout(900)

CHECKPOINT = "registry.test/checkpoint/of-podman:1"


class Podman:
    """Runs podman with a separate store and the peer's runc: Debian's crun is without CRIU."""

    def __init__(self, folder: Path) -> None:
        self._words = (
            "podman", "--root", str(folder / "root"), "--runroot", str(folder / "run"),
            "--runtime", str(toolchain.peer() / "bin/runc"),
        )  # fmt: skip

    def __call__(self, *arguments: str) -> str:
        command = [*self._words, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    folder = tmp_path_factory.mktemp("podman")
    image = folder / "busybox.tar"
    image.write_bytes(build.docker_archive({IMAGE: build.busybox()}))
    engine = Podman(folder)
    try:
        engine("load", "-q", "-i", str(image))
        yield engine
    finally:
        engine("system", "reset", "--force")


def checkpoint_theirs(podman: Podman, *options: str) -> None:
    """Start a container under podman that counts, and checkpoint it, which ends the container."""
    podman("run", "-d", "--name", "counting", IMAGE, "sh", "-c", WORKLOAD)
    try:
        assert wait_until(lambda: len(podman("logs", "counting").split()) > 5, 120, 0.5)
        # If the container continued, podman would look for changed files without pausing it.
        podman("container", "checkpoint", *options, "counting")
    finally:
        podman("rm", "--force", "--time", "0", "counting")


@pytest.mark.requirement("4.11.1")
# zstd is podman's default.
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_an_archive_of_podman_is_restored(
    server: Server, podman: Podman, tmp_path: Path, compression: str
) -> None:
    archive = tmp_path / "theirs.tar"
    checkpoint_theirs(podman, "--compress", compression, "--export", str(archive))
    container = restore(server, archive, config(server))
    # The container image names no mode for its root folder.
    assert server.output(container, "stat", "-c", "%a", "/") == "555\n"
    assert server.output(container, "cat", "/run/.containerenv") == ""
    goes_on(server, container)


def test_an_image_with_a_checkpoint_of_podman_is_restored(
    server: Server, podman: Podman, tmp_path: Path
) -> None:
    saved = tmp_path / "image.tar"
    checkpoint_theirs(podman, "--create-image", CHECKPOINT)
    podman("save", "-q", "--format", "oci-archive", "-o", str(saved), CHECKPOINT)
    server.load_image(saved.read_bytes())
    goes_on(server, restore(server, CHECKPOINT, config(server)))
