"""Tests that limits are written in order, missing controllers are reported, and a failed update
restores the old values. The cgroup is a folder with plain files."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pyrunc.cgroups import limits
from pyrunc.errors import InvalidArgument, KernelError, Unsupported


def group(folder: Path, **files: str) -> Path:
    (folder / "cgroup.controllers").write_text("cpu memory pids\n")
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_limits_are_written_to_their_files(tmp_path: Path) -> None:
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


def test_a_file_that_its_controller_does_not_offer_is_always_an_error(tmp_path: Path) -> None:
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


def test_missing_controllers_is_error_or_warn(tmp_path: Path) -> None:
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


@pytest.fixture
def bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cgroup folder with a CPU quota of 100 ms and a burst of 50 ms. A write that makes
    the burst larger than the quota fails with EINVAL."""
    group(tmp_path, cpu_max="100000 100000\n", cpu_max_burst="50000\n", memory_max="max\n")

    def write(directory: str, file: str, content: str) -> None:
        files = {"cpu.max": "", "cpu.max.burst": ""} | {file: content}
        quota, burst = (
            (files[name] or (tmp_path / name).read_text()).split()[0]
            for name in ("cpu.max", "cpu.max.burst")
        )
        # As in tg_set_bandwidth(), kernel/sched/core.c.
        if quota != "max" and int(burst) > int(quota):
            raise KernelError("write", f"'{file}'", errno.EINVAL)
        (tmp_path / file).write_text(content + "\n")

    monkeypatch.setattr(limits.cgroup, "write", write)
    return tmp_path


def cpu_limits(folder: Path) -> tuple[str, str]:
    quota = (folder / "cpu.max").read_text().split()[0]
    return quota, (folder / "cpu.max.burst").read_text().strip()


CHANGES = {
    "both are lower": {"quota": 20000, "burst": 10000},
    "both are higher": {"quota": 400000, "burst": 200000},
    "the quota is lower": {"quota": 60000},
    "the burst is higher": {"burst": 90000},
}


@pytest.mark.parametrize("cpu", CHANGES.values(), ids=CHANGES)
def test_an_update_sets_quota_and_burst(bounded: Path, cpu: dict[str, int]) -> None:
    limits.replace(str(bounded), {"cpu": cpu}, "error")
    assert cpu_limits(bounded) == (str(cpu.get("quota", 100000)), str(cpu.get("burst", 50000)))


@pytest.mark.parametrize("cpu", CHANGES.values(), ids=CHANGES)
def test_a_failed_update_restores_quota_and_burst(bounded: Path, cpu: dict[str, int]) -> None:
    def refuse() -> None:
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument, match="no") as caught:
        limits.replace(str(bounded), {"cpu": cpu}, "error", refuse)
    assert cpu_limits(bounded) == ("100000", "50000")
    assert not hasattr(caught.value, "__notes__")


def test_a_burst_above_the_quota_of_unified_is_set_after_it(bounded: Path) -> None:
    resources = {"cpu": {"burst": 150000}, "unified": {"cpu.max": "200000 100000"}}
    limits.write(str(bounded), resources, "error")
    assert cpu_limits(bounded) == ("200000", "150000")


@pytest.mark.parametrize("key", ["cpu", "unified"])
def test_a_burst_above_the_quota_is_refused(bounded: Path, key: str) -> None:
    by_key = {"cpu": {"burst": 150000}, "unified": {"cpu.max.burst": "150000"}}
    with pytest.raises(InvalidArgument, match=r"cpu\.max\.burst"):
        limits.replace(str(bounded), {key: by_key[key]}, "error")
    assert cpu_limits(bounded) == ("100000", "50000")
