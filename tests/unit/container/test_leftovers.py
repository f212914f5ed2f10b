"""Tests that a container's folder is removed for good: concurrent changes neither keep it nor bring
it back."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyrunc.accelerate import exec_cache as again
from pyrunc.container import state
from pyrunc.container.state import State


def test_storing_the_program_of_an_exec_does_not_make_a_deleted_container_again(
    tmp_path: Path,
) -> None:
    gone = State("gone", str(tmp_path / "gone"))
    program = SimpleNamespace(encoded=b"", pid_op=1)
    lowered = SimpleNamespace(numbers={}, program=program)
    again.store(gone, b"key", lowered, 0, ())
    assert not os.listdir(tmp_path)
    (tmp_path / "gone").mkdir()
    again.store(gone, b"key", lowered, 0, ())
    assert again.load(gone, b"key") is not None


def test_two_processes_may_remove_the_same_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal ends without an error even if another process removes the files that it has
    listed."""
    folder, scandir = tmp_path / "container", os.scandir
    (folder / "programs").mkdir(parents=True)
    for path in (folder / "state.json", folder / "programs" / "one", folder / "programs" / "two"):
        path.touch()

    def old_entries(path: str) -> list[os.DirEntry[str]]:
        with scandir(path) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for name in ("one", "state.json"):
            Path(path, name).unlink(missing_ok=True)
        return ordered

    monkeypatch.setattr(os, "scandir", old_entries)
    for _ in range(2):
        state.remove(str(folder))
    assert not folder.exists()
