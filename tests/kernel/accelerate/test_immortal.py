"""Objects whose reference counts a fork does not write, where Python has such a thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyrunc.accelerate.immortal")

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys
from pyrunc.accelerate.immortal import make_immortal
import pyrunc.shim.main as module

class Plain: pass
plain, table, file = Plain(), {"a": ["b"]}, [open("/dev/null")]
made = make_immortal()
counted = sys.getrefcount(module), sys.getrefcount(plain), sys.getrefcount(Plain), sys.getrefcount(table)
others = [[module, plain, Plain, table] for _ in range(100)]
again = sys.getrefcount(module), sys.getrefcount(plain), sys.getrefcount(Plain), sys.getrefcount(table)
table["c"] = table.pop("a"); table["c"].append("d")
assert table == {"c": ["b", "d"]}
number = file[0].fileno()
file.clear()
try:
    os.fstat(number)
except OSError:
    print(made > 0, counted == again)
"""


def test_counts_stay_and_files_are_closed() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    possible = sys.version_info >= (3, 12)
    assert (found.stdout.split(), found.stderr) == ([str(possible)] * 2, "")


def test_a_fork_writes_less() -> None:
    script = """
import os, sys
from pyrunc.zygote import preload
preload.load(["pyrunc.shim.main"])
if sys.argv[1] == "counted": sys.modules["pyrunc.accelerate.immortal"] = None
preload.freeze()
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
things = list(sys.modules.values())
pid = os.fork()
if not pid:
    begin = private()
    kept = [list(vars(thing).values()) for thing in things if thing]
    print(private() - begin, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    grown = {}
    for how in ("counted", "immortal"):
        found = subprocess.run(
            [sys.executable, "-c", script, how], cwd=ROOT, capture_output=True, text=True, check=True
        )
        grown[how] = int(found.stdout)
    print(grown, os.uname().release)
    assert grown["immortal"] < grown["counted"] / 2 or sys.version_info < (3, 12)


def test_nothing_remembers_all_objects() -> None:
    """Each fork's first collection would go through it."""
    script = """
import gc
from pyrunc.accelerate.immortal import lasting
import pyrunc.shim.main as module
found = lasting()
count = len(found)
kept = [thing for thing in found if type(thing).__name__ == "cell"]  # as if they lasted for ever
del found
gc.collect()
print(count > 5_000, [type(one) for one in gc.get_objects() if hasattr(one, "__len__") and type(one) is dict and len(one) > count / 2])
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (found.stdout.split(), found.stderr) == (["True", "[]"], "")
