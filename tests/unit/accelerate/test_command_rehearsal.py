"""Commands that are carried out before the snapshot of the interpreter is taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REHEARSES = """
import os, sys

from pyrunc.accelerate.snapshot import WORKS

for name in WORKS:
    __import__(name)
from pyrunc import jsontext
from pyrunc.accelerate.command_rehearsal import ROUNDS, rehearse
from pyrunc.kernel import cgroup

folder = sys.argv[1]
os.makedirs(folder + "/bundle")  # an earlier one was killed
codes = rehearse(folder)
assert codes == [0] * 2 * ROUNDS, codes
assert not os.path.exists(folder)
assert cgroup._root == "" and jsontext._halves is None, "this process is not the one that will be"
assert "_json" not in sys.modules and sys.stdout is sys.__stdout__
print("done")
"""


def test_a_rehearsal_succeeds_and_leaves_nothing_of_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", REHEARSES, str(tmp_path / "rehearsal")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
