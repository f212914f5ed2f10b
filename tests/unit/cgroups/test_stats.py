"""Tests that a cgroup's files are parsed into numbers; values of missing files are None."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyrunc.cgroups import stats


def test_io_lines_leave_out_devices_without_numbers() -> None:
    assert stats.io_lines("8:0 rbytes=1 wbytes=2 rios=3\n252:0 \n") == {
        "8:0": {"rbytes": 1, "wbytes": 2, "rios": 3}
    }


def test_max_is_no_limit() -> None:
    assert stats.amount("max\n") is None and stats.amount("4096\n") == 4096


@pytest.mark.parametrize(
    ("kilobytes", "name"),
    [(64, "64KB"), (2048, "2MB"), (32768, "32MB"), (1048576, "1GB"), (16777216, "16GB")],
)
def test_huge_page_sizes_are_named_as_in_cgroup_files(kilobytes: int, name: str) -> None:
    assert stats.size_name(kilobytes) == name


def test_pressure_lines_are_parsed() -> None:
    text = "some avg10=0.12 avg60=1.00 avg300=0.00 total=5\n"
    assert stats.pressure_lines(text) == {
        "some": {"avg10": 0.12, "avg60": 1.0, "avg300": 0.0, "total": 5}
    }
    assert isinstance(stats.pressure_lines(text)["some"]["total"], int)  # Go programs read a uint64


def test_statistics_without_a_file_are_none(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 7\nuser_usec 4\nsystem_usec 3\n")
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.events").write_text("low 0\noom_kill 2\n")
    usage = stats.read(str(tmp_path))
    assert usage.cpu == {"usage_usec": 7, "user_usec": 4, "system_usec": 3}
    assert usage.memory == stats.Memory(4096, stat={}, events={"low": 0, "oom_kill": 2})
    assert usage.pids is None and usage.io == {}


def test_a_group_that_is_gone_is_empty() -> None:
    usage = stats.read("/sys/fs/cgroup/nothing-of-that-name")
    assert usage.cpu is None and usage.memory is None and usage.pressure == {}
