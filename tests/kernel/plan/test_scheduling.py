"""Scheduling, limits and memory policy of a container's process and of an exec, read from /proc
and the kernel."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from struct import unpack
from typing import Any

import pytest

from pyrunc.abi.arch import arch
from pyrunc.abi.process import RLIMITS
from pyrunc.errors import InvalidSpec, KernelError
from tests.kernel.box import Box

_syscall = ctypes.CDLL(None).syscall
MEMORY = {
    "MPOL_BIND": "bind",
    "MPOL_INTERLEAVE": "interleave",
    "MPOL_WEIGHTED_INTERLEAVE": "weighted interleave",
    "MPOL_PREFERRED": "prefer",
    "MPOL_PREFERRED_MANY": "prefer (many)",
}


def attributes(pid: int) -> dict[str, int]:
    """Return the scheduling attributes of a process, as sched_getattr(2) reports them."""
    buffer = ctypes.create_string_buffer(48)
    assert _syscall(arch().syscalls["sched_getattr"], pid, buffer, 48, 0) == 0
    names = ("size", "policy", "flags", "nice", "priority", "runtime", "deadline", "period")
    return dict(zip(names, unpack("<IIQiIQQQ", buffer.raw), strict=True))


def ioprio(pid: int) -> tuple[int, int]:
    value: int = _syscall(arch().syscalls["ioprio_get"], 1, pid)
    return value >> 13, value & 0x1FFF


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ({"policy": "SCHED_OTHER", "nice": 7}, {"policy": 0, "nice": 7}),
        ({"policy": "SCHED_OTHER", "nice": -7}, {"policy": 0, "nice": -7}),
        ({"policy": "SCHED_BATCH", "nice": 19}, {"policy": 3, "nice": 19}),
        ({"policy": "SCHED_IDLE"}, {"policy": 5}),
        ({"policy": "SCHED_FIFO", "priority": 3}, {"policy": 1, "priority": 3}),
        ({"policy": "SCHED_RR", "priority": 9, "flags": ["SCHED_FLAG_RESET_ON_FORK"]},
        {"policy": 2, "priority": 9, "flags": 1}),
        ({"policy": "SCHED_DEADLINE", "runtime": 1 << 20, "deadline": 1 << 27, "period": 1 << 28},
         {"policy": 6, "runtime": 1 << 20, "deadline": 1 << 27, "period": 1 << 28}),
    ],
)  # fmt: skip
def test_a_process_has_its_scheduler(
    box: Box, scheduler: dict[str, Any], expected: dict[str, int]
) -> None:
    box.process["scheduler"] = scheduler
    with box.running() as (created, _):
        assert {**attributes(created.pid), **expected} == attributes(created.pid)


def test_refusals_of_the_kernel_are_reported(box: Box) -> None:
    box.process["scheduler"] = {"policy": "SCHED_FIFO", "priority": 100}
    with pytest.raises(KernelError, match="scheduler SCHED_FIFO nice 0 priority 100: EINVAL"):
        box.run("true")


@pytest.mark.parametrize(("name", "number"), [("RT", 1), ("BE", 2), ("IDLE", 3)])
def test_a_process_has_its_io_priority(box: Box, name: str, number: int) -> None:
    box.process["ioPriority"] = {"class": f"IOPRIO_CLASS_{name}", "priority": 5}
    with box.running() as (created, _):
        assert ioprio(created.pid) == (number, 5)


def test_an_exec_has_its_own_scheduling_or_the_containers(box: Box) -> None:
    box.process["scheduler"] = {"policy": "SCHED_BATCH", "nice": 3}
    box.process["ioPriority"] = {"class": "IOPRIO_CLASS_BE", "priority": 2}
    box.linux["personality"] = {"domain": "LINUX32"}
    box.linux["memoryPolicy"] = {"mode": "MPOL_BIND", "nodes": "0"}
    box.process["execCPUAffinity"] = {"initial": "0", "final": "1"}
    with box.running() as (created, request):
        script = (
            "cut -d' ' -f19,41 /proc/$$/stat; cat /proc/$$/personality; grep -c bind:0 "
            "/proc/$$/numa_maps; grep Cpus_allowed_list /proc/$$/status"
        )
        words = box.execute(created, request, script).split()
        assert words[:3] == ["3", "3", "00000008"]
        assert int(words[3]) > 3
        assert words[-1] == "1"
        own = {
            "scheduler": {"policy": "SCHED_OTHER", "nice": 9},
            "execCPUAffinity": {"initial": "1", "final": "0-1"},
        }
        words = box.execute(created, request, script, own).split()
        assert words[:2] == ["9", "0"] and words[-1] == "0-1"
        assert os.sched_getaffinity(created.pid) == {0, 1}


@pytest.mark.parametrize("mode", MEMORY)
@pytest.mark.parametrize("flag", ["", "MPOL_F_STATIC_NODES", "MPOL_F_RELATIVE_NODES"])
def test_a_process_has_its_memory_policy(box: Box, mode: str, flag: str) -> None:
    box.linux["memoryPolicy"] = {"mode": mode, "nodes": "0", "flags": [flag] if flag else []}
    with box.running() as (created, _):
        words = {
            line.split()[1]
            for line in Path(f"/proc/{created.pid}/numa_maps").read_text().splitlines()
        }
        kind = {
            "": ":0",
            "MPOL_F_STATIC_NODES": "=static:0",
            "MPOL_F_RELATIVE_NODES": "=relative:0",
        }[flag]
        expected = MEMORY[mode].split()[0] + (kind if " " not in MEMORY[mode] else "")
        assert expected in words, words


@pytest.mark.parametrize(("mode", "word"), [("MPOL_DEFAULT", "default"), ("MPOL_LOCAL", "local")])
def test_a_memory_policy_may_have_no_nodes(box: Box, mode: str, word: str) -> None:
    box.linux["memoryPolicy"] = {"mode": mode}
    with box.running() as (created, _):
        assert word in {
            line.split()[1]
            for line in Path(f"/proc/{created.pid}/numa_maps").read_text().splitlines()
        }


@pytest.mark.parametrize(
    ("policy", "where"),
    [
        ({"mode": "MPOL_LOCAL", "nodes": "0"}, "nodes: MPOL_LOCAL takes no nodes"),
        ({"mode": "MPOL_INTERLEAVE"}, "nodes: MPOL_INTERLEAVE needs nodes"),
        ({"mode": "MPOL_BIND", "nodes": "0-"}, "nodes: '0-' is not a list"),
        ({"mode": "MPOL_BIND", "nodes": "0", "flags": ["MPOL_F_X"]}, r"flags\[0\]: unknown flag"),
    ],
)
def test_impossible_memory_policies_are_refused(
    box: Box, policy: dict[str, Any], where: str
) -> None:
    box.linux["memoryPolicy"] = policy
    with pytest.raises(InvalidSpec, match=rf"linux\.memoryPolicy\.{where}"):
        box.run("true")


def test_every_rlimit_is_set(box: Box) -> None:
    names = {"AS": "address space", "CORE": "core file size", "CPU": "cpu time",
        "DATA": "data size", "FSIZE": "file size",
             "LOCKS": "file locks", "MEMLOCK": "locked memory", "MSGQUEUE": "msgqueue size",
             "NICE": "nice priority",
             "NOFILE": "open files", "NPROC": "processes", "RSS": "resident set",
             "RTPRIO": "realtime priority",
             "RTTIME": "realtime timeout", "SIGPENDING": "pending signals",
             "STACK": "stack size"}  # fmt: skip
    assert {f"RLIMIT_{name}" for name in names} == RLIMITS.keys()
    big = {"AS": 1 << 32, "DATA": 1 << 31, "STACK": 1 << 22, "FSIZE": 1 << 30, "RSS": 1 << 30}
    values = {name: (big.get(name, 20 + i), big.get(name, 30 + i)) for i, name in enumerate(names)}
    here = {name: os_limit(name) for name in names}
    # without CAP_SYS_RESOURCE
    values = {n: (min(s, here[n]), min(h, here[n])) for n, (s, h) in values.items()}
    box.process["rlimits"] = [
        {"type": f"RLIMIT_{n}", "soft": s, "hard": h} for n, (s, h) in values.items()
    ]
    with box.running() as (created, request):
        lines = Path(f"/proc/{created.pid}/limits").read_text().splitlines()[1:]
        limits = {line[:25].strip().lower(): tuple(line[25:].split()[:2]) for line in lines}
        for name, (soft, hard) in values.items():
            assert limits[f"max {names[name]}"] == (str(soft), str(hard)), name
        text = box.execute(created, request, "ulimit -n; ulimit -H -n").split()
        assert tuple(map(int, text)) == values["NOFILE"]


def os_limit(name: str) -> int:
    from pyrunc.kernel.limit import prlimit

    hard = prlimit(0, f"RLIMIT_{name}")[1]
    return 1 << 63 if hard == -1 else hard


def test_flags_of_a_personality_are_a_warning(box: Box) -> None:
    box.linux["personality"] = {"domain": "LINUX", "flags": ["ADDR_NO_RANDOMIZE"]}
    with box.running() as (created, _):
        assert "linux.personality.flags: ADDR_NO_RANDOMIZE are ignored" in created.warnings
        assert Path(f"/proc/{created.pid}/personality").read_text().strip() == "00000000"
