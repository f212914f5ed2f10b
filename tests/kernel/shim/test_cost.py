"""Tests that a shim does no work while its pods are idle, and that its memory and imports are
limited."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.kernel.shim.pod import TIMEOUT_S, TestPod

ROOT = Path(__file__).parents[3]

# What importing the shim loads besides our own modules. Each name here is in every shim: add with
# care.
FOREIGN = {
    "_collections_abc",
    "_ctypes",
    "_heapq",
    "_json",
    "_operator",
    "_signal",
    "_socket",
    "_stat",
    "_struct",
    "array",
    "ctypes",
    "enum",
    "errno",
    "fcntl",
    "functools",
    "gc",
    "genericpath",
    "heapq",
    "os",
    "posixpath",
    "select",
    "signal",
    "stat",
    "struct",
    "sys",
    "termios",
    "time",
    "types",
    "collections",
    "itertools",
    "keyword",
    "operator",
    "reprlib",
    "_collections",
    "_functools",
    "math",
    "marshal",
    "_blake2",
}
PRIVATE_LIMIT_KIB, PRIVATE_LIMIT_AFTER_EXEC_KIB = 8192, 8192
MORE, MORE_LIMIT_KIB = 20, 48  # containers, and what each may add


def test_the_shim_imports_only_the_listed_modules() -> None:
    script = (
        "import sys; before = set(sys.modules); sys.path[:0] = sys.argv[1:]; import"
        " pyrunc.shim.main;print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    paths = [str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))]
    listing = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    tops = {name.partition(".")[0] for name in listing.stdout.split()}
    assert tops - FOREIGN == {"__future__", "pyrunc"}


async def test_an_idle_shim_uses_little_memory_and_no_processor_time(tmp_path: Path) -> None:
    async with (
        TestPod(tmp_path / "other") as other,
        TestPod(tmp_path / "pod", library=True) as pod,
    ):
        await other.client.state()
        for n in range(3):
            await pod.run(f"c{n}", "echo hello; exec sleep 1000")
        before = await _quiet(pod.pid)
        await asyncio.sleep(2)
        assert _cpu_and_switches(pod.pid) == before
        private = _private_kib(pod.pid)
        session = await pod.exec("c0", "e", {"args": ["true"], "cwd": "/"})
        await session.exited
        session.close()
        after_exec = _private_kib(pod.pid)
        for n in range(MORE):
            await pod.run(f"more{n}", "echo hello; exec sleep 1000")
        each = (_private_kib(pod.pid) - after_exec) / MORE
        print(
            f"{private} KiB with three containers, {after_exec} after an exec, {each:.0f} for each"
            " more"
        )
        assert private < PRIVATE_LIMIT_KIB and after_exec < PRIVATE_LIMIT_AFTER_EXEC_KIB
        assert each < MORE_LIMIT_KIB
        assert len(os.listdir(f"/proc/{pod.pid}/fd")) < 20 + 4 * (MORE + 3)


async def _quiet(pid: int) -> tuple[list[str], str]:
    """Returns `_cpu_and_switches` of a process once it has not changed for half a second."""
    async with asyncio.timeout(TIMEOUT_S):
        earlier = None
        while earlier != (now := _cpu_and_switches(pid)):
            earlier = now
            await asyncio.sleep(0.5)
        return now


def _private_kib(pid: int) -> int:
    return _kib(pid, "Private_Dirty") + _kib(pid, "Private_Clean")


def _kib(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def _cpu_and_switches(pid: int) -> tuple[list[str], str]:
    """Returns the CPU times in /proc/PID/stat and the count of voluntary context switches."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    status = Path(f"/proc/{pid}/status").read_text()
    return stat, next(line for line in status.splitlines() if line.startswith("voluntary_ctxt"))
