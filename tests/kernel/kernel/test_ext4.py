"""Tests that folders get the attribute `T` only where it helps, on an ext4 without a journal."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cri_server.store.paths import Paths
from pyrunc.kernel.ext4 import spread_subfolders
from tests.support.disks import make_ext4

GROUPS_OF_1024_INODES = ("-b", "1024", "-g", "8192", "-N", "32768", "-O", "^flex_bg")


@contextmanager
def mounted(folder: Path, *what: str | Path) -> Iterator[Path]:
    """Mount `what` with these options of mount(8)."""
    place = folder / "mounted"
    place.mkdir()
    subprocess.run(["mount", *what, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def attributes(folder: Path) -> str:
    """Return the letters that lsattr(1) shows."""
    return subprocess.check_output(["lsattr", "-d", folder], text=True).split()[0].replace("-", "")


def group_of(path: Path, image: Path) -> int:
    """Return the block group of the inode."""
    text = subprocess.check_output(["dumpe2fs", "-h", image], text=True, stderr=subprocess.DEVNULL)
    (line,) = (line for line in text.splitlines() if line.startswith("Inodes per group:"))
    return (path.stat().st_ino - 1) // int(line.split()[-1])


def test_pods_and_containers_folders_are_spread_on_an_ext4_without_a_journal(
    tmp_path: Path,
) -> None:
    """Folders of pods and containers get the attribute `T`, also an existing folder of an earlier
    version, which keeps its other attributes. All folders can be removed as before."""
    image = make_ext4(tmp_path / "disk", *GROUPS_OF_1024_INODES, "-O", "^has_journal")
    with mounted(tmp_path, "-o", "loop", image) as disk:
        (disk / "root/sandboxes").mkdir(parents=True)
        subprocess.run(["chattr", "+A", disk / "root/sandboxes"], check=True)
        paths = Paths(disk / "root", tmp_path / "state")
        for _ in range(2):
            paths.prepare()
            assert {"A", "T"} <= set(attributes(paths.sandbox_records))
            assert "T" in attributes(paths.container_records)
        folders = [paths.sandbox_root(f"{number:064x}") for number in range(40)]
        for folder in folders:
            folder.mkdir()
            (folder / "hosts").touch()
            assert group_of(folder / "hosts", image) == group_of(folder, image)
        assert len({group_of(folder, image) for folder in folders}) > 3
        assert "T" not in attributes(folders[0])
        shutil.rmtree(disk / "root")


def test_folders_on_an_ext4_with_a_journal_are_not_spread(tmp_path: Path) -> None:
    image = make_ext4(tmp_path / "disk", "-O", "has_journal")
    with mounted(tmp_path, "-o", "loop", image) as disk:
        assert not spread_subfolders(disk)
        assert "T" not in attributes(disk)


@pytest.mark.parametrize("what", ["tmpfs", "overlay"])
def test_folders_on_another_file_system_are_not_spread(what: str, tmp_path: Path) -> None:
    layers = [tmp_path / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    options = (
        "lowerdir={},upperdir={},workdir={}".format(*layers) if what == "overlay" else "size=1m"
    )
    with mounted(tmp_path, "-t", what, "-o", options, what) as disk:
        Paths(disk / "root", disk / "state").prepare()
        assert not spread_subfolders(disk / "root/sandboxes")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spread_subfolders(tmp_path / "none")
