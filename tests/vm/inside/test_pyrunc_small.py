"""Tests a container with very little memory: no memory of the runtime is charged to it, so only its
program must fit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.vm.inside.detached import MIB
from tests.vm.inside.test_pyrunc_limits import limited_container


@pytest.mark.parametrize("limit_bytes", [6 * MIB, 2 * MIB, MIB])
def test_a_small_container_starts_and_runs_an_exec(tmp_path: Path, limit_bytes: int) -> None:
    box = limited_container(tmp_path)
    memory = {"limit": limit_bytes, "swap": limit_bytes}
    try:
        box.start(
            "/bin/busybox", "sleep", "100", resources={"memory": memory, "pids": {"limit": 2}}
        )
        assert int(box.read("memory.max")) == limit_bytes
        assert box.pyrunc("exec", box.id, "/bin/busybox", "echo", "hi").stdout == "hi\n"
        events = dict(line.split() for line in box.read("memory.events").splitlines())
        assert events["oom_kill"] == "0"
        assert int(box.read("memory.peak")) <= limit_bytes
    finally:
        box.pyrunc("delete", "--force", box.id)


def test_a_program_larger_than_the_limit_is_killed(tmp_path: Path) -> None:
    box = limited_container(tmp_path)
    script = "x=0123456789abcdef; while :; do x=$x$x; done"
    try:
        box.start(
            "/bin/busybox",
            "sh",
            "-c",
            f"sleep 1; ({script}); sleep 100",
            resources={"memory": {"limit": 6 * MIB, "swap": 6 * MIB}},
        )
        group = box.group

        def kills() -> str:
            return dict(
                line.split() for line in (group / "memory.events").read_text().splitlines()
            )["oom_kill"]

        deadline = time.monotonic() + 60
        while kills() == "0":
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        box.pyrunc("delete", "--force", box.id)


def test_create_refuses_a_limit_too_low_for_any_process(tmp_path: Path) -> None:
    box = limited_container(tmp_path)
    memory = {"limit": 8192, "swap": 8192}
    with pytest.raises(AssertionError, match="OOM-killed"):
        box.start("/bin/busybox", "true", resources={"memory": memory})
    assert box.pyrunc("state", box.id, check=False).returncode == 1
