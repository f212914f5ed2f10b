"""Tests the relabelling of volumes in which a container has put links and mounts: files outside of
the volume keep their labels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from pyrunc.kernel.tree import remove_path
from tests.cri.server_harness import Server
from tests.vm.selinux.labels import read

DEPTH = 1000
EXCHANGE = """
import ctypes, time
exchange = ctypes.CDLL(None).renameat2
print(flush=True)
while True:
    for name in (b"folder", b"file"):
        exchange(-100, name, -100, name + b".out", 2)
    time.sleep(0.001)  # emulated processors are for the relabelling, too
"""


def label_of(path: Path) -> bytes:
    return os.getxattr(path, "security.selinux", follow_symlinks=False)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Make a folder and a file on the volume's file system, with labels of the host."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("content")
    for path in (folder, folder / "file"):
        os.setxattr(path, "security.selinux", b"system_u:object_r:etc_t:s0")
    return folder


@pytest.fixture
def volume(tmp_path: Path, outside: Path) -> Iterator[Path]:
    """Provide a volume with links and mounts that lead out of it, a tmpfs and a FIFO."""
    volume = tmp_path / "volume"
    for name in ("folder/deep", "bind", "tmpfs"):
        (volume / name).mkdir(parents=True)
    for name in ("file", "bound"):
        (volume / name).write_text("x")
    os.mkfifo(volume / "fifo")
    (volume / "folder.out").symlink_to(outside)
    (volume / "file.out").symlink_to(outside / "file")
    mounts = (
        ("bind", "--bind", str(outside)),
        ("bound", "--bind", str(outside / "file")),
        ("tmpfs", "-t", "tmpfs", "t"),
    )
    try:
        for name, *source in mounts:
            subprocess.run(["mount", *source, str(volume / name)], check=True)
        yield volume
    finally:
        for name, *_ in mounts:
            subprocess.run(["umount", str(volume / name)], check=False)
        remove_path(volume)


@pytest.fixture
def bottom(volume: Path) -> Iterator[int]:
    """Make folders in the volume, deeper than a path may be; provide a descriptor of the
    deepest."""
    folder = os.open(volume, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d" * 100, dir_fd=folder)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    yield folder
    os.close(folder)


@pytest.mark.requirement("8.10")
def test_relabelling_a_hostile_volume_stays_inside(
    server: Server, volume: Path, outside: Path, bottom: int
) -> None:
    """The volume is relabelled for two pods, one after the other, while its entries are swapped
    with links. Its deepest folder and its FIFO get each pod's label; targets of links and mounts
    keep their own."""
    mount = api.Mount(container_path="/volume", host_path=str(volume), selinux_relabel=True)
    untouched = [outside, outside / "file", volume / "tmpfs"]
    before = {path: label_of(path) for path in untouched}
    racing = subprocess.Popen([sys.executable, "-c", EXCHANGE], cwd=volume, stdout=subprocess.PIPE)
    try:
        assert racing.stdout is not None and racing.stdout.readline() == b"\n"
        for number in (5, 6):
            pod = server.pod_config()
            level = f"s0:c{number},c{number + 10}"
            pod.linux.security_context.selinux_options.CopyFrom(api.SELinuxOption(level=level))
            config = server.container_config(mounts=[mount])
            container = server.create(server.run_pod(pod, host_network=True), config)
            assert {path: label_of(path) for path in untouched} == before
            for label in (
                os.getxattr(f"/proc/self/fd/{bottom}", "security.selinux"),
                label_of(volume / "fifo"),
            ):
                assert (read(label).type, read(label).level) == ("container_file_t", level)
            server.remove_container(container)
        assert racing.poll() is None
    finally:
        racing.kill()
        racing.communicate()


@pytest.mark.requirement("8.10")
@pytest.mark.parametrize(
    "field, value",
    [("user", "system_u:object_r:etc_t"), ("level", "s0:c1:etc_t"), ("user", "no_such_u")],
)
def test_an_invalid_label_is_refused(
    server: Server, tmp_path: Path, field: str, value: str
) -> None:
    """A user or level that would replace other parts of the label is refused, and so is a user that
    the policy does not know. The volume keeps its label."""
    volume = tmp_path / "volume"
    volume.mkdir()
    before = label_of(volume)
    config = server.container_config(
        mounts=[api.Mount(container_path="/volume", host_path=str(volume), selinux_relabel=True)]
    )
    config.linux.security_context.selinux_options.CopyFrom(api.SELinuxOption(**{field: value}))
    with pytest.raises(grpc.RpcError, match=value):
        server.create(server.run_pod(host_network=True), config)
    assert label_of(volume) == before


@pytest.mark.requirement("8.10")
def test_a_container_cannot_link_files_of_another_volume(
    server: Server, tmp_path: Path, outside: Path
) -> None:
    """link(2) from one volume to a file of another fails: both are on the same file system, but not
    on the same mount."""
    (tmp_path / "plain").mkdir()
    mounts = [
        api.Mount(
            container_path="/volume", host_path=str(tmp_path / "plain"), selinux_relabel=True
        ),
        api.Mount(container_path="/outside", host_path=str(outside)),
    ]
    container = server.launch(
        server.run_pod(host_network=True), server.container_config(mounts=mounts)
    )
    answer = server.exec(container, "ln", "/outside/file", "/volume/name")
    assert answer.exit_code and not (tmp_path / "plain/name").exists()
    assert read(label_of(outside / "file")).type == "etc_t"
