"""Tests that the modules that a verb imports are in the program's snapshot (pyrunc/cli/front.c): a
search for a module takes half a millisecond."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.system.harness import Runtime


def searched(runtime: Runtime, trace: Path, *words: str) -> list[str]:
    """Return the compiled Python modules that a command opens, and the folders in which it searches
    for modules. The command must succeed."""
    command = [
        "strace",
        "-qq",
        "-o",
        str(trace),
        "-e",
        "trace=openat,newfstatat",
        *runtime.command(*words),
    ]
    with open(trace.with_suffix(".out"), "wb") as output:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)
    named = [line.split('"')[1] for line in trace.read_text().splitlines() if '"' in line]
    return [path for path in named if path.endswith((".pyc", "/lib-dynload"))]


def test_the_verbs_of_a_containers_life_search_for_no_module(
    runtime: Runtime, tmp_path: Path
) -> None:
    if not runtime.is_pyrunc or not Path(runtime.program[0]).read_bytes().startswith(b"\x7fELF"):
        pytest.skip("only the program has a snapshot")
    box, short = runtime.box("sleep", "3600"), runtime.box("true")
    commands = (
        ("create", "--bundle", str(box.folder), box.id),
        ("start", box.id),
        ("exec", box.id, "true"),
        ("state", box.id),
        ("kill", box.id, "KILL"),
        ("delete", "--force", box.id),
        ("run", "--bundle", str(short.folder), short.id),
    )
    searches = {
        words[0]: searched(runtime, tmp_path / f"{words[0]}.trace", *words) for words in commands
    }
    assert searches == {words[0]: [] for words in commands}
