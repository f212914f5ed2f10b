"""Tests the order of blocks in the snapshot (pyrunc/accelerate/heap_order.c): memory blocks to
which a command writes are neighbours."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from pyrunc.cli import entry

RUNS_ONCE = """
import os, sys

from pyrunc.accelerate.command_rehearsal import run_once
from pyrunc.cli.fast import run

folder, log = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def resume(arguments, environment, interrupt_ignored):
    os.write(log, f"{arguments[-2]} {run(arguments[1:])}\\n".encode())


os.makedirs(folder + "/bundle")  # an earlier one was killed
run_once(folder, lambda phase: os.write(log, f"phase {phase}\\n".encode()), resume)
assert not os.path.exists(folder)
"""


def test_each_command_runs_once_in_its_phase_and_succeeds(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNS_ONCE, str(tmp_path / "rehearsal"), str(tmp_path / "log")]
    subprocess.run(command, check=True)
    assert (tmp_path / "log").read_text().splitlines() == [
        "phase 2",
        *("phase 1", "state 0"),
        *("phase 1", "start 0"),
        *("phase 1", "delete 0"),
    ]


def page_faults(folder: Path) -> float:
    """Build the program `pyrunc` in `folder`; return the median number of page faults of `pyrunc
    state`."""
    here = entry.here()
    paths = entry.InstallPaths(here.python, here.searched, str(folder))
    program = folder / "pyrunc"
    (folder / "root").mkdir(parents=True)
    assert entry.compile_program(str(program), paths)
    subprocess.run([program, "--write-snapshot", paths.snapshot], check=True)
    assert sorted(os.listdir(folder)) == ["pyrunc", "pyrunc-snapshot", "root"]
    counts = []
    for _ in range(5):
        words = [str(program), "--root", str(folder / "root"), "state", "missing"]
        child = os.posix_spawn(program, words, {})
        _, status, usage = os.wait4(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1
        counts.append(usage.ru_minflt)
    return statistics.median(counts)


@pytest.mark.skipif(entry.native() is None, reason="needs a compiler and Python's static library")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the order is found on x86 only")
def test_a_command_copies_fewer_pages_of_an_ordered_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = page_faults(tmp_path / "ordered")
    monkeypatch.setattr(entry, "HEAP_ORDER", str(tmp_path / "missing"))
    plain = page_faults(tmp_path / "plain")
    assert ordered < 0.92 * plain  # 0.84 on Python 3.11
