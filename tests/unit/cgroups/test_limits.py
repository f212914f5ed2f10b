"""Writing limits: order, missing controllers, and restoring. The group is a folder with real
files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrunc.cgroups import limits
from pyrunc.errors import InvalidArgument, KernelError, Unsupported


def group(folder: Path, **files: str) -> Path:
    (folder / "cgroup.controllers").write_text("cpu memory pids\n")
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_values_arrive(tmp_path: Path) -> None:
    group(tmp_path, memory_max="", pids_max="", cpu_max="max 100000")
    notes = limits.write(
        str(tmp_path),
        {"memory": {"limit": 4096}, "pids": {"limit": 7}, "cpu": {"quota": 5000}},
        "error",
    )
    assert notes == []
    assert (tmp_path / "memory.max").read_text() == "4096"
    assert (tmp_path / "pids.max").read_text() == "7"
    assert (tmp_path / "cpu.max").read_text() == "5000 100000"


def test_no_limit_needs_no_file(tmp_path: Path) -> None:
    group(tmp_path)
    assert (
        limits.write(str(tmp_path), {"pids": {"limit": -1}, "memory": {"limit": -1}}, "error") == []
    )


def test_a_file_that_its_controller_does_not_offer_is_an_error_in_both_ways(tmp_path: Path) -> None:
    group(tmp_path)
    for choice in ("error", "warn"):
        with pytest.raises(Unsupported, match=r"memory\.max"):
            limits.write(str(tmp_path), {"memory": {"limit": 5}}, choice)


def test_a_missing_controller_is_an_error_or_a_warning(tmp_path: Path) -> None:
    group(tmp_path)
    resources = {"unified": {"nothing.max": "5"}}
    with pytest.raises(Unsupported, match="the nothing controller is not on the cgroup v2 tree"):
        limits.write(str(tmp_path), resources, "error")
    (note,) = limits.write(str(tmp_path), resources, "warn")
    assert "nothing.max" in note


def test_the_choice_has_two_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="error, warn"):
        limits.write(str(tmp_path), {}, "ignore")


def test_a_failed_update_puts_everything_back(tmp_path: Path) -> None:
    group(tmp_path, memory_max="100", memory_swap_max="50")
    (tmp_path / "pids.max").mkdir()  # writing it fails with EISDIR
    with pytest.raises(KernelError, match=r"pids\.max"):
        limits.replace(
            str(tmp_path), {"memory": {"limit": 200, "swap": 300}, "pids": {"limit": 3}}, "error"
        )
    assert (tmp_path / "memory.max").read_text() == "100"
    assert (tmp_path / "memory.swap.max").read_text() == "50"


def test_a_failed_callback_restores_the_limits(tmp_path: Path) -> None:
    group(tmp_path, memory_max="100")

    def refuse() -> None:
        assert (tmp_path / "memory.max").read_text() == "200"
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument, match="no"):
        limits.replace(str(tmp_path), {"memory": {"limit": 200}}, "error", refuse)
    assert (tmp_path / "memory.max").read_text() == "100"
