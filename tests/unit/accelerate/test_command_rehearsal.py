"""Tests the rehearsal of commands, which precedes the snapshot of the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REHEARSES = """
import os, sys

from pyrunc.accelerate.snapshot import MODULES

for name in MODULES:
    __import__(name)
from pyrunc import jsontext
from pyrunc.accelerate import command_rehearsal
from pyrunc.accelerate.command_rehearsal import ROUNDS, rehearse
from pyrunc.compile import host
from pyrunc.errors import KernelError
from pyrunc.kernel import cgroup

folder, may_compile = sys.argv[1], sys.argv[2] == "compiles"
is_root = sys.argv[2] != "is an ordinary user"
os.geteuid = lambda: 0 if is_root else 1000
compile_container, compiled = command_rehearsal.compile_container, []


def compile(*arguments):
    if not may_compile:
        raise KernelError("open_tree", "x", 1)
    compiled.append(compile_container(*arguments))


command_rehearsal.compile_container = compile
os.makedirs(folder + "/bundle")  # an earlier one was killed
codes = rehearse(folder)
assert codes == ([0] * 2 * ROUNDS if is_root else []), codes
assert len(compiled) == (ROUNDS if may_compile else 0)
assert not os.path.exists(folder)
unset = cgroup._root == "" and host._host is None and jsontext._halves is None
assert unset, "facts of this process are not those of a command"
assert "_json" not in sys.modules and sys.stdout is sys.__stdout__
print("done")
"""


@pytest.mark.parametrize("rights", ["compiles", "has no right to mount", "is an ordinary user"])
def test_a_rehearsal_succeeds_and_leaves_nothing_of_its_process(
    rights: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", REHEARSES, str(tmp_path / "rehearsal"), rights]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
