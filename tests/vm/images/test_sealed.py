"""Tests images that are mounted from an ext4 with fs-verity: a changed file is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from pyrunc.kernel import verity
from tests.cri.server_harness import Server, image_archive
from tests.support.disks import make_ext4

CONTENT = b"The content of a file that will be changed. " * 3000
IMAGE = "registry.test/sealed:1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    disk = make_ext4(tmp_path / "disk", "-O", "verity", "-b", "4096", size_bytes=256 << 20)
    with Server(
        network=False, settings={"images": {"store": "erofs"}}, mount=["-o", "loop", str(disk)]
    ) as server:
        server.load_image()
        server.load_image(image_archive(IMAGE, {"f": CONTENT}))
        yield server


def sealed_files(server: Server) -> list[Path]:
    return [
        path
        for folder in ("tars", "indexes")
        for path in (server.root / "images" / folder).iterdir()
    ]


def with_volume(server: Server) -> api.ContainerConfig:
    volume = api.Mount(container_path="/v", readonly=True, image=api.ImageSpec(image=IMAGE))
    return server.container_config(mounts=[volume])


def tar_of(server: Server) -> Path:
    return next(path for path in sealed_files(server) if CONTENT in path.read_bytes())


def digest(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return verity.measure(fd)
    finally:
        os.close(fd)


def test_files_are_sealed_and_run(server: Server) -> None:
    files = sealed_files(server)
    assert len(files) >= 4 and all(
        re.fullmatch("sha256:[0-9a-f]{64}", digest(path)) for path in files
    )
    with pytest.raises(PermissionError):
        open(files[0], "r+b").close()
    signatures = {path.name: path.read_text() for path in (server.root / "images/verity").iterdir()}
    assert signatures == {f"{path.parent.name}-{path.name}": digest(path) for path in files}
    server.restart()
    container = server.launch(server.run_pod(host_network=True), with_volume(server))
    assert server.output(container, "wc", "-c", "/v/f").split()[0] == str(len(CONTENT))
    server.remove_all()
    server.image.RemoveImage(api.RemoveImageRequest(image=api.ImageSpec(image=IMAGE)))
    assert {path.name for path in (server.root / "images/verity").iterdir()} == {
        f"{path.parent.name}-{path.name}" for path in sealed_files(server)
    }


def test_a_byte_that_changed_on_the_disk_is_not_read(server: Server) -> None:
    tar = tar_of(server)
    place = tar.read_bytes().index(CONTENT) + 5 * 4096
    [row] = [
        line.split()
        for line in subprocess.run(
            ["filefrag", "-b4096", "-v", tar], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if re.match(r"\s*0:", line)
    ]
    first = int(row[3].rstrip(".").rstrip(":").split(".")[0])
    server.kill()
    device = subprocess.run(
        ["findmnt", "-no", "SOURCE", server.root], capture_output=True, text=True, check=True
    ).stdout.strip()
    subprocess.run(["sync", "-f", server.root], check=True)
    with open(device, "r+b") as disk:
        disk.seek(first * 4096 + place)
        byte = disk.read(1)
        disk.seek(first * 4096 + place)
        disk.write(bytes([byte[0] ^ 1]))
        disk.flush()
        os.fsync(disk.fileno())
    # With all caches dropped, shims in an emulator would answer too late.
    with open(tar, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(OSError, match="Input/output error"):
        tar.read_bytes()
    server.start()
    container = server.launch(server.run_pod(host_network=True), with_volume(server))
    done = server.exec(container, "cat", "/v/f")
    assert done.exit_code == 1 and b"Input/output error" in done.stderr


def test_a_file_that_was_replaced_is_not_mounted(server: Server) -> None:
    tar = tar_of(server)
    server.kill()
    shutil.copyfile(tar, tar.with_name("copy"))
    os.replace(tar.with_name("copy"), tar)
    server.start()
    with pytest.raises(
        grpc.RpcError,
        match=r"is not the file that was written: its fs-verity digest was sha256:.* not sealed",
    ):
        server.create(server.run_pod(host_network=True), with_volume(server))
