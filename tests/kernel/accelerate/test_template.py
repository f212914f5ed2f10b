"""Pages that a fork of a zygote gives back: what it has changed stays, and all that it shares goes on as before."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from cri_server.app import SHIM_MODULES
from pyrunc.shim.client import SHIM
from pyrunc.zygote.client import Zygote
from tests.bench.memory import private_kib
from tests.kernel.shim.pod import TestPod, until

template = pytest.importorskip("pyrunc.accelerate.template")

ROOT = Path(__file__).parents[3]
BEGIN = f"""
import gc, os, signal, sys
from pyrunc.zygote import preload
from pyrunc.accelerate import template
numbers, table, words = list(range(10_000)), {{str(n): [n] for n in range(2_000)}}, ["word"] * 3
preload.load({SHIM_MODULES})
preload.freeze()
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
pid = os.fork()
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def in_fork(script: str) -> list[str]:
    """What a fork prints that runs `script` after `BEGIN`."""
    found = subprocess.run([sys.executable, "-c", BEGIN + script], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, ""), found
    return found.stdout.split()


def test_what_was_only_read_is_given_back() -> None:
    script = """
for _ in range(5):
    kept = [(name, len(values)) for name, values in table.items()]
    del kept
before = private()
given = template.give_back()
print(before, private(), given)
"""
    before, after, given = map(int, in_fork(script))
    # From 3.12 on there is little to give back: counts are not written.
    assert after < before and (given > 50 or sys.version_info >= (3, 12))


def test_what_was_changed_stays() -> None:
    script = """
for turn in range(50):
    numbers[turn * 100] = -turn
    table[str(turn)].append(turn)
    table[f"new{turn}"] = table.pop(str(turn + 500))
    words[turn % 3] = f"another {turn}"
    made = [bytes(n) for n in range(500)]
    template.give_back()
    assert [len(one) for one in made] == list(range(500))
assert numbers == [-(n // 100) if n % 100 == 0 and n < 5_000 else n for n in range(10_000)]
assert all(table[str(n)] == [n, n] and table[f"new{n}"] == [n + 500] for n in range(50))
assert len(table) == 2_000 and words == ["another 48", "another 49", "another 47"]
gc.collect()
print("same")
"""
    assert in_fork(script) == ["same"]


def test_an_object_that_is_held_and_let_go_stays() -> None:
    """A count goes back to what the zygote had while the fork holds the object; letting it go takes more than was added."""
    script = """
for turn in range(200):
    held = [table[str(n)] for n in range(2_000)] * 20
    template.give_back()
    del held
gc.collect()
assert all(table[str(n)] == [n] for n in range(2_000))
print("same")
"""
    assert in_fork(script) == ["same"]


def test_code_that_runs_between_goes_on() -> None:
    """Functions that were specialised before, that are from now on, and that the fork has made itself."""
    script = """
from pyrunc import jsontext
def own(n):
    return [value * 2 for value in range(n) if value % 3]
class Point:
    def __init__(self, x): self.x = x
    def twice(self): return self.x + self.x
for turn in range(300):
    assert own(30) == [n * 2 for n in range(30) if n % 3]
    assert Point(turn).twice() == 2 * turn and Point(str(turn)).twice() == str(turn) * 2
    assert jsontext.loads(jsontext.dumps({"turn": turn, "list": [turn] * 3})) == {"turn": turn, "list": [turn] * 3}
    if turn == 150:
        Point.twice = lambda self: self.x + self.x
    template.give_back()
print("same")
"""
    assert in_fork(script) == ["same"]


def test_a_signal_is_not_lost() -> None:
    script = """
seen = []
signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
for turn in range(300):
    before = len(seen)
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    template.give_back()
    while len(seen) == before:
        signal.sigtimedwait([], 0.001)
print(len(seen))
"""
    assert in_fork(script) == ["300"]


def test_only_what_is_still_mapped_is_looked_at() -> None:
    """Four pages of a file, of which one is mapped no more."""
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, 4 * 4096)
        maps = [mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, offset=i * 4096) for i in range(4)]
        ranges = array("Q", [word for i, one in enumerate(maps) for word in (_address(one), 4096, i * 4096)])
        found = template._Template(None, file, ranges, 0)
        assert template._still_mapped(found) == ranges
        maps[1].close()
        assert template._still_mapped(found) == ranges[:3] + ranges[6:]
        for one in maps:
            one.close()
        assert not template._still_mapped(found)
    finally:
        os.close(file)


def test_what_is_not_mapped_any_more_is_not_made() -> None:
    """malloc(3) may give memory back to the kernel after the ranges were listed."""
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, 4 * 4096)
        half, whole, gone = mmap.mmap(-1, 2 * 4096), mmap.mmap(-1, 4096), mmap.mmap(-1, 4096)
        half[:4], whole[:5] = b"half", b"whole"
        sizes = ((half, 2), (whole, 1), (gone, 1))
        ranges, offset = array("Q"), 0
        for one, pages in sizes:
            ranges.extend((_address(one), pages * 4096, offset))
            offset += pages * 4096
        half.resize(4096)
        gone.close()
        assert template._load().template_make(file, ranges.buffer_info()[0], 3) == 0
        assert [ranges[i] for i in (1, 4, 7)] == [4096, 4096, 0]
        for one, at in ((half, 0), (whole, 2 * 4096)):
            said = one[:5]
            assert os.pread(file, 5, at) == said
            one[:5] = b"other"
            assert os.pread(file, 5, at) == said
    finally:
        os.close(file)


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


async def test_a_shim_gives_back(tmp_path: Path) -> None:
    """It starts containers, and execs in them, before and after."""
    zygote = await Zygote.start([*SHIM_MODULES, "tests.kernel.accelerate.tidy_at_once"], SHIM)
    try:
        async with TestPod(tmp_path / "pod", library=True, zygote=zygote) as pod:
            for n in range(3):
                await pod.run(f"c{n}", "echo hello; exec sleep 1000")
            for n in range(10):
                session = await pod.exec("c0", f"e{n}", {"args": ["sh", "-c", f"exit {n}"], "cwd": "/"})
                assert await session.exited == n
                session.close()
            assert len((await pod.client.state()).containers) == 3
            # 2.9 MiB when it gives nothing back
            await until(lambda: private_kib([pod.pid]) < 1536)
    finally:
        await zygote.close()
