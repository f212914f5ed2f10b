"""Tests that two threads can use a new record type at the same time."""

from __future__ import annotations

import subprocess
import sys

# One thread reads the type of Outer's field while the other one asks for an Outer, which must wait;
# the first continues after half a second. Without the wait the process ends by SIGSEGV.
PROGRAM = """
from __future__ import annotations
import threading
import msgspec
from cri_server import typed

inside, done, found = threading.Event(), threading.Event(), []

def field_type():
    inside.set()
    done.wait(0.5)
    return int

class Inner(msgspec.Struct):
    a: field_type()

class Outer(msgspec.Struct):
    inner: Inner
    others: list[Inner]

def meet():
    found.append(typed.convert({"inner": {"a": 1}, "others": []}, Outer))
    done.set()

first, second = threading.Thread(target=meet), threading.Thread(target=meet)
first.start()
inside.wait()
second.start()
first.join()
second.join()
assert found == [Outer(Inner(1), [])] * 2
assert typed.decode('{"a": 2}', Inner) == Inner(2)
"""


def test_threads_can_use_a_new_type_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
