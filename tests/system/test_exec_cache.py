"""Tests the compiled programs of `exec` that pyrunc.accelerate stores with their container;
test_exec.py tests what they do."""

from __future__ import annotations

import pytest

from tests.system.harness import Box, Runtime


@pytest.fixture
def box(runtime: Runtime) -> Box:
    if not runtime.is_pyrunc:
        pytest.skip("a store of ours")
    return runtime.box("sleep", "60").up()


def stored_programs(box: Box) -> list[str]:
    folder = box.runtime.root / box.id / "programs"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def test_the_same_command_is_stored_once(box: Box) -> None:
    for _ in range(3):
        box.exec("id", "-u", options=["--user", "7:8"]).ok()
    assert len(stored_programs(box)) == 1
    box.exec("id", "-u", options=["--user", "8:8"]).ok()
    assert len(stored_programs(box)) == 2


def test_cached_execs_are_few_and_removed_with_the_container(box: Box) -> None:
    for number in range(20):
        box.exec("true", str(number)).ok()
    assert 1 <= len(stored_programs(box)) <= 16
    box.delete("--force").ok()
    assert not (box.runtime.root / box.id).exists()
