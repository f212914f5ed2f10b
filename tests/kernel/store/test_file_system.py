"""The server's checks of its directories at start, on real file systems."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cri_server.store import file_system
from cri_server.store.claim import claimed
from cri_server.store.paths import Paths
from pyrunc.errors import Error, ResourceExhausted, Unsupported, WrongState
from tests.support.disks import make_ext4

Mount = Callable[..., None]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Provide a function that mounts with mount(8) and makes the mount point; unmount everything at
    the end."""
    mounts: list[Path] = []

    def mount(place: Path, *words: object) -> None:
        place.mkdir(exist_ok=True)
        subprocess.run(["mount", *map(str, words), str(place)], check=True)
        mounts.append(place)

    yield mount
    for place in reversed(mounts):
        subprocess.run(["umount", str(place)], check=True)


def check(tmp_path: Path) -> Paths:
    """Run the checks that a server runs at its start."""
    with claimed(tmp_path / "root", tmp_path / "state") as paths:
        file_system.check(paths)
        return paths


def test_a_plain_disk_and_a_tmpfs_will_do(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "root", "-o", "loop", make_ext4(tmp_path / "disk", size_bytes=16 << 20))
    mount(tmp_path / "state", "-t", "tmpfs", "-o", "noexec,nosuid,nodev", "state")
    for _ in range(2):
        paths = check(tmp_path)
    assert not (paths.root / "probe").exists() and not (paths.state / "probe").exists()


def test_an_overlay_cannot_be_the_root(tmp_path: Path, mount: Mount) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount(tmp_path / "root", "-t", "overlay", "-o", layers, "overlay")
    with pytest.raises(
        Unsupported, match=f"^{tmp_path}/root is on overlay, where overlayfs cannot write a layer"
    ):
        check(tmp_path)
    assert not (tmp_path / "root" / "probe").exists()


def test_a_file_system_without_types_cannot_be_the_root(tmp_path: Path, mount: Mount) -> None:
    disk = make_ext4(tmp_path / "disk", "-O", "^filetype", size_bytes=16 << 20)
    mount(tmp_path / "root", "-o", "loop", disk)
    with pytest.raises(Unsupported, match=f"^{tmp_path}/root is on ext4 without d_type"):
        check(tmp_path)


def test_a_file_system_without_attributes_cannot_be_the_root(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "root", "-t", "ramfs", "root")
    with pytest.raises(Unsupported, match=f"^{tmp_path}/root is on ramfs"):
        check(tmp_path)


@pytest.mark.parametrize("name", ["root", "state"])
def test_a_read_only_directory_is_named(tmp_path: Path, mount: Mount, name: str) -> None:
    mount(tmp_path / name, "-t", "tmpfs", "-o", "ro", "disk")
    with pytest.raises(Error, match=f"{tmp_path}/{name}.*EROFS"):
        check(tmp_path)


def test_a_full_root_is_a_warning(
    tmp_path: Path, mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    mount(tmp_path / "root", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "disk")
    check(tmp_path)
    fill(tmp_path / "root")
    with caplog.at_level(logging.WARNING):
        check(tmp_path)
    assert re.search(f"no (space|inodes) left on the file system of {tmp_path}/root", caplog.text)


def test_a_full_state_directory_is_refused(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path / "state", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "state")
    check(tmp_path)
    fill(tmp_path / "state")
    with pytest.raises(
        ResourceExhausted, match=f"no (space|inodes) left on the file system of {tmp_path}/state"
    ):
        check(tmp_path)


def fill(folder: Path) -> None:
    """Write to the folder until the file system has neither space nor a free inode."""
    with (
        pytest.raises(OSError, match="No space left"),
        open(folder / "fill", "wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(65536))
    with pytest.raises(OSError, match="No space left"):
        for number in range(64):
            os.mknod(folder / f"inode{number}")


@pytest.mark.parametrize("name", ["root", "state"])
def test_another_users_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    os.chown(tmp_path / name, 12345, 12345)
    with pytest.raises(WrongState, match=f"{tmp_path}/{name} belongs to user 12345"):
        check(tmp_path)
