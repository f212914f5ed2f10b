"""Tests that a container gets descriptors of a service manager, and others, at the same numbers,
with the variables of sd_listen_fds(3)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.system.harness import Result, Runtime


@contextmanager
def files(folder: Path, count: int) -> Iterator[list[int]]:
    """Open `count` files, each with its number in it; a child gets them as descriptors 3 and up."""
    numbers = []
    for index in range(count):
        path = folder / f"file{index}"
        path.write_text(f"content{index}\n")
        numbers.append(os.open(path, os.O_RDONLY))
    try:
        yield numbers
    finally:
        for number in numbers:
            os.close(number)


def run(
    runtime: Runtime, folder: Path, script: str, listen: int, more: int, options: str = ""
) -> Result:
    """Run the runtime with files as descriptors 3 and up: `listen` of them are announced by the
    variables of socket activation, `more` are not."""
    box = runtime.box("sh", "-c", script)
    words = runtime.command("run", *options.split(), "--bundle", str(box.folder),
        box.id)  # fmt: skip
    with files(folder, listen + more) as numbers:
        moves = " ".join(f"{3 + i}<&{number}" for i, number in enumerate(numbers))
        listening = f"LISTEN_FDS={listen} LISTEN_PID=$$ " if listen else ""
        shell = f"{listening}exec {' '.join(words)} {moves}"
        program, runtime.program = runtime.program, ["bash", "-c", f"{shell} #"]
        try:
            return runtime(pass_fds=numbers)
        finally:
            runtime.program = program


def test_sockets_of_a_service_manager_are_passed(runtime: Runtime, tmp_path: Path) -> None:
    script = "echo $LISTEN_FDS $LISTEN_PID; cat <&3; cat <&4; ls /proc/self/fd | wc -l"
    result = run(runtime, tmp_path, script, 2, 0).ok()
    assert result.out.split() == ["2", "1", "content0", "content1", "6"]


def test_preserved_descriptors_are_passed(runtime: Runtime, tmp_path: Path) -> None:
    result = run(
        runtime, tmp_path, "echo x$LISTEN_FDS; cat <&3; cat <&4", 0, 2, "--preserve-fds 2"
    ).ok()
    assert result.out.split() == ["x", "content0", "content1"]


def test_activation_sockets_precede_preserved_descriptors(runtime: Runtime, tmp_path: Path) -> None:
    script = "echo $LISTEN_FDS; cat <&3; cat <&4; cat <&5"
    result = run(runtime, tmp_path, script, 1, 2, "--preserve-fds 2").ok()
    assert result.out.split() == ["1", "content0", "content1", "content2"]


def test_other_descriptors_are_not_inherited(runtime: Runtime, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, "ls /proc/self/fd | wc -l; echo x$LISTEN_FDS", 0, 2).ok()
    assert result.out.split() == ["4", "x"]


def test_a_missing_descriptor_is_an_error(runtime: Runtime, tmp_path: Path) -> None:
    run(runtime, tmp_path, "true", 0, 1, "--preserve-fds 40").fails("")


@pytest.mark.parametrize("pid", ["1", ""])
def test_sockets_of_another_process_are_not_passed(runtime: Runtime, pid: str) -> None:
    box = runtime.box("sh", "-c", "echo x$LISTEN_FDS; ls /proc/self/fd | wc -l")
    # sd_listen_fds(3): descriptors are for the process LISTEN_PID only.
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": pid}
    result = runtime("run", "--bundle", str(box.folder), box.id, env=environment).ok()
    assert result.out.split() == ["x", "4"]
