"""Runs the client's verbs: in the test's process, which is fast, or as a program in the server's
network namespace."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from cri_server.cli.main import program
from cri_server.cli.output.report import exit_code
from pyrunc.errors import Error
from tests.cri.server_harness import REPOSITORY, Server


@dataclass(frozen=True)
class Result:
    """The output and the exit code of a verb, and the message of the Error that it raised."""

    out: str
    err: str
    code: int
    error: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def call(
    server: Server | str, *arguments: str, stdin: bytes | str | None = None, **environment: str
) -> Result:
    """Run a verb in this process, without a terminal."""
    address = server if isinstance(server, str) else f"unix://{server.socket}"
    outcome = CliRunner().invoke(
        program, ["--address", address, *arguments], input=stdin, env=environment
    )
    if outcome.exception is not None and not isinstance(
        outcome.exception, SystemExit | Error | click.ClickException
    ):
        raise outcome.exception
    error = str(outcome.exception) if isinstance(outcome.exception, Error) else ""
    code = (
        exit_code(outcome.exception) if isinstance(outcome.exception, Error) else outcome.exit_code
    )
    return Result(outcome.stdout, outcome.stderr, code, error)


def ok(
    server: Server | str, *arguments: str, stdin: bytes | str | None = None, **environment: str
) -> Result:
    """Run a verb as `call` does, and check that it succeeds."""
    result = call(server, *arguments, stdin=stdin, **environment)
    assert result.code == 0, result
    return result


PROGRAM = (sys.executable, "-m", "cri_server.cli.main")


def local_command_line(server: Server, *arguments: str) -> list[str]:
    """Return the command line of `pyrunc-cri` with the server's address."""
    return [*PROGRAM, "--address", f"unix://{server.socket}", *arguments]


def command_line(server: Server, *arguments: str) -> list[str]:
    """Return the command line that runs `pyrunc-cri` in the server's network namespace."""
    # Sessions connect to the server's loopback address.
    namespace = f"--net=/proc/{server.pid}/ns/net"
    return ["nsenter", namespace, "--", *local_command_line(server, *arguments)]


def cli(
    server: Server, *arguments: str, code: int = 0, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run `pyrunc-cri` as a program in the server's network namespace; check its exit code."""
    return _run(command_line(server, *arguments), code, stdin)


def local_cli(server: Server, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    """Run `pyrunc-cri` as a program outside of the server's network namespace."""
    return _run(local_command_line(server, *arguments), code, b"")


def _run(command: list[str], code: int, stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def on_terminal(
    server: Server, *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `pyrunc-cri` on a terminal that script(1) makes, and type `stdin` there."""
    command = shlex.join(local_command_line(server, *arguments))
    return subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=60,
        check=False,
    )


@contextlib.contextmanager
def started(
    server: Server, *arguments: str, stdout: Any = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `pyrunc-cri` as a program. It is killed at the end of the block, or after a minute."""
    command = command_line(server, *arguments)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=stdout, stderr=subprocess.PIPE)
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> tuple[bytes, int]:
    """Wait for the process; return the rest of its stderr, and its exit code."""
    assert process.stderr is not None
    return process.stderr.read(), process.wait()
