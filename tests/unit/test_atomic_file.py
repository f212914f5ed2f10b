"""Tests that records are complete, whatever happens during the writing, and synced on request."""

from __future__ import annotations

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pyrunc import atomic_file

LENGTHS = (10, 200_000)
WRITES = 200


def test_concurrent_writes_of_a_record_leave_one_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "one.json"

    def write(number: int) -> None:
        atomic_file.write_json(str(path), {"letters": chr(97 + number % 26) * LENGTHS[number % 2]})
        letters = atomic_file.read_json(str(path))["letters"]
        assert len(letters) in LENGTHS and len(set(letters)) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(WRITES)))
    assert os.listdir(tmp_path) == ["one.json"]


def test_a_failed_write_leaves_the_old_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    atomic_file.write_json(str(path), {"first": True})
    os.mkdir(tmp_path / "folder")
    with pytest.raises(IsADirectoryError):
        atomic_file.write_bytes(str(tmp_path / "folder"), b"text")
    assert json.loads(path.read_text())["first"] and sorted(os.listdir(tmp_path)) == [
        "folder",
        "one.json",
    ]


@pytest.mark.parametrize("named_first", [False, True])
def test_a_record_that_the_disk_refuses_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_first: bool
) -> None:
    names: list[list[str]] = []

    def refuse(descriptor: int) -> None:
        names.append(os.listdir(tmp_path))
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    path = str(tmp_path / "one.json")
    with pytest.raises(OSError, match=re.escape(path)):
        atomic_file.write_json(path, {}, durable=True, named_first=named_first)
    ((name,),) = names
    assert (name == "one.json") == named_first and not os.listdir(tmp_path)
