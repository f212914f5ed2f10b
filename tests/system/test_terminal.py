"""Tests containers with a terminal: who gets the master, and what the program sees."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.console import Console, receive_terminal
from tests.system.harness import Runtime, eventually


def with_terminal(config: dict[str, Any]) -> None:
    config["process"]["terminal"] = True


def test_the_console_socket_gets_the_master_of_a_detached_container(
    runtime: Runtime, tmp_path: Path
) -> None:
    box = runtime.box("sh", change=with_terminal)
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        console.write(b"test -t 0 && test -t 1 && test -t 2 && echo all-$((40+2))\n")
        console.read_until(b"all-42")
        console.write(b"ls -l /dev/console | cut -c1; tty\n")
        console.read_until(b"/dev/")
        console.write(b"exit\n")
        box.gone()


def test_a_terminal_has_the_configured_size(runtime: Runtime, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        with_terminal(config)
        config["process"]["consoleSize"] = {"height": 33, "width": 77}

    box = runtime.box("stty", "size", change=change)
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        console.read_until(b"33 77")


def test_a_console_socket_can_have_a_long_path(runtime: Runtime, tmp_path: Path) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("old runc takes short paths only")
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        console = Console(Path("c"))
    finally:
        os.chdir(before)
    try:
        box = runtime.box("echo", "long", change=with_terminal)
        box.create("--console-socket", str(folder / "c")).ok()
        box.start().ok()
        console.read_until(b"long")
    finally:
        console.close()


def test_a_detached_terminal_needs_a_console_socket(runtime: Runtime, tmp_path: Path) -> None:
    runtime.box("true", change=with_terminal).create().fails("cannot allocate tty if")
    runtime.box("true").create("--console-socket", str(tmp_path / "c")).fails(
        "cannot use console socket if"
    )


def test_a_console_socket_without_a_listener_undoes_all(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box("true", change=with_terminal)
    box.create("--console-socket", str(tmp_path / "nobody")).fails()
    runtime("state", box.id).fails("does not exist")


def test_an_attached_run_uses_the_callers_terminal(runtime: Runtime) -> None:
    box = runtime.box(
        "sh", "-c", "read line; echo got-$line; stty size; exit 6", change=with_terminal
    )
    command = runtime.command("run", "--bundle", str(box.folder), box.id)
    master, slave = pty.openpty()
    try:
        subprocess.run(["stty", "rows", "22", "cols", "66"], stdin=slave, check=True)
        with subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        ) as running:
            os.write(master, b"line\r")
            output = b""
            while b"22 66" not in output:
                output += os.read(master, 4096)
            assert b"got-line" in output
            assert running.wait(60) == 6
    finally:
        os.close(master)
        os.close(slave)


@contextmanager
def own_terminal() -> Iterator[tuple[int, int]]:
    """Return (master, slave) of a new terminal for the runtime's caller."""
    master, slave = pty.openpty()
    try:
        yield master, slave
    finally:
        os.close(master)
        os.close(slave)


def captured(command: list[str], slave: int, stdin: int | None = None) -> bytes:
    """Return the command's stdout, a pipe. Stderr is the terminal `slave`; so is stdin, unless
    `stdin` is set."""
    return subprocess.run(
        command,
        stdin=slave if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=slave,
        start_new_session=True,
        timeout=60,
        check=True,
    ).stdout


def test_captured_output_has_the_bytes_of_the_program(runtime: Runtime) -> None:
    box = runtime.box("printf", "a\\nb\\r\\nc\\n", change=with_terminal)
    with own_terminal() as (_, slave):
        before = termios.tcgetattr(slave)
        run = runtime.command("run", "--bundle", str(box.folder), box.id)
        assert captured(run, slave) == b"a\nb\r\nc\n"
        assert termios.tcgetattr(slave) == before


def test_captured_output_of_an_exec_has_the_bytes_of_the_program(runtime: Runtime) -> None:
    box = runtime.box("sleep", "1000").up()
    with own_terminal() as (_, slave):
        run = runtime.command("exec", "-t", box.id, "printf", "a\\nb\\n")
        assert captured(run, slave) == b"a\nb\n"


def test_long_input_reaches_a_program_that_writes_as_much(runtime: Runtime, tmp_path: Path) -> None:
    """A program that writes as much as it reads gets all its input."""
    copy = {"destination": "/tmp", "source": str(tmp_path), "type": "bind", "options": ["bind"]}

    def change(config: dict[str, Any]) -> None:
        with_terminal(config)
        config["mounts"].append(copy)

    box = runtime.box("tee", "/tmp/copy", change=change)
    # A terminal takes no input while output fills it.
    lines = b"".join(b"line %06d\n" % number for number in range(30_000))
    output = runtime("run", "--bundle", str(box.folder), box.id, stdin=lines).ok().out
    assert (tmp_path / "copy").read_bytes() == lines
    assert output.endswith("line 029999\n")


def test_input_that_a_program_does_not_read_does_not_delay_its_end(runtime: Runtime) -> None:
    box = runtime.box("sleep", "1", change=with_terminal)
    runtime("run", "--bundle", str(box.folder), box.id, stdin=b"unread\n" * 30_000).ok()


def test_at_a_terminal_newlines_are_translated_once(runtime: Runtime) -> None:
    box = runtime.box("printf", "a\\nb\\n", change=with_terminal)
    run = runtime.command("run", "--bundle", str(box.folder), box.id)
    with own_terminal() as (master, slave):
        subprocess.run(
            run,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            timeout=60,
            check=True,
        )
        assert os.read(master, 4096) == b"a\r\nb\r\n"


def test_the_size_is_read_from_any_descriptor_with_a_terminal(runtime: Runtime) -> None:
    """The container's terminal gets the size of the caller's terminal, which only stderr has
    open."""
    box = runtime.box("sh", "-c", "until stty size 2>/dev/null | grep ' '; do :; done",
        change=with_terminal)  # fmt: skip
    run = runtime.command("run", "--bundle", str(box.folder), box.id)
    with own_terminal() as (_, slave):
        subprocess.run(["stty", "rows", "22", "cols", "66"], stdin=slave, check=True)
        assert captured(run, slave, subprocess.DEVNULL).split()[-2:] == [b"22", b"66"]


def test_the_end_of_a_terminal_ends_the_program(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box("cat", change=with_terminal)
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        console.write(b"\x04")
        eventually(lambda: box.status == "stopped")


def test_a_terminal_without_a_mount_namespace_is_a_terminal_of_the_host(
    runtime: Runtime, tmp_path: Path
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc mounts on the host, and leaves that there")

    def change(config: dict[str, Any]) -> None:
        with_terminal(config)
        config["linux"]["namespaces"] = [{"type": "pid"}, {"type": "uts"}]

    box = runtime.box("sh", change=change)
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        console.write(b"test -t 0 && test -t 1 && test -t 2 && echo all-$((40+2)); exit\n")
        console.read_until(b"all-42")
        box.gone()
