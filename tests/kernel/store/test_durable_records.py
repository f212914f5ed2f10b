"""Tests a record on ext4 after a power cut: absent or empty before the write has ended, complete
afterwards."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pyrunc import atomic_file
from tests.support.disks import make_ext4, snapshot

OPTIONS = "loop,commit=300"  # the journal is committed by fsync(2) alone


def after_a_power_cut(image: Path, place: Path) -> list[bytes]:
    """Return the contents of all records that a power cut would leave on the disk."""
    copy = snapshot(image, image.with_name("after"))
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", OPTIONS, copy, place], check=True)
    try:
        return [path.read_bytes() for path in place.glob("*.json")]
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_record_that_is_named_first_is_empty_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record is empty if the power is cut when another file's fsync has committed the record's
    name to the journal, but the content is still in memory. After the write it is complete."""
    image, disk = make_ext4(tmp_path / "disk"), tmp_path / "mounted"
    disk.mkdir()
    subprocess.run(["mount", "-o", OPTIONS, image, disk], check=True)
    fsync, seen = os.fsync, list[list[bytes]]()

    def cut_before(descriptor: int) -> None:
        if not seen:
            with open(disk / "other", "wb") as other:
                fsync(other.fileno())
            seen.append(after_a_power_cut(image, tmp_path / "after-mounted"))
        fsync(descriptor)

    try:
        monkeypatch.setattr(os, "fsync", cut_before)
        path = disk / "one.json"
        atomic_file.write_json(str(path), {"letters": "x" * 9000}, durable=True, named_first=True)
        assert seen == [[b""]]
        assert after_a_power_cut(image, tmp_path / "after-mounted") == [path.read_bytes()]
        assert not atomic_file.is_unwritten(path)
    finally:
        subprocess.run(["umount", disk], check=True)
