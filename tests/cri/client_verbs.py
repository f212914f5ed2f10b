"""How tests call the client's verbs: in this process, which is fast, or as a program in the
server's network."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from cri_server.cli.main import program
from cri_server.cli.output.complaint import exit_code
from pyrunc.errors import Error
from tests.cri.server_harness import REPOSITORY, Server


@dataclass(frozen=True)
class Said:
    """What a verb has written, its exit code, and the error of ours that it ended with."""

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
    server: Server | str, *words: str, stdin: bytes | str | None = None, **environment: str
) -> Said:
    """Run a verb in this process: without a terminal."""
    address = server if isinstance(server, str) else f"unix://{server.socket}"
    done = CliRunner().invoke(program, ["--address", address, *words], input=stdin, env=environment)
    if done.exception is not None and not isinstance(
        done.exception, SystemExit | Error | click.ClickException
    ):
        raise done.exception
    error = str(done.exception) if isinstance(done.exception, Error) else ""
    code = exit_code(done.exception) if isinstance(done.exception, Error) else done.exit_code
    return Said(done.stdout, done.stderr, code, error)


def ok(
    server: Server | str, *words: str, stdin: bytes | str | None = None, **environment: str
) -> Said:
    """As `call`; it must succeed."""
    said = call(server, *words, stdin=stdin, **environment)
    assert said.code == 0, said
    return said


def command_line(server: Server, *words: str) -> list[str]:
    """`pyrunc-cri` in the server's network namespace (sessions connect to its loopback)."""
    return [
        *(
            "nsenter",
            f"--net=/proc/{server.pid}/ns/net",
            "--",
            sys.executable,
            "-m",
            "cri_server.cli.main",
        ),
        *("--address", f"unix://{server.socket}", *words),
    ]


def cli(
    server: Server, *words: str, code: int = 0, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run `pyrunc-cri` and wait for its end."""
    command = command_line(server, *words)
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


@contextlib.contextmanager
def started(
    server: Server, *words: str, stdout: Any = subprocess.PIPE
) -> Iterator[subprocess.Popen[bytes]]:
    """As `cli`, without waiting for its end; it ends with the block, and a test that waits for it
    after a minute."""
    command = command_line(server, *words)
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
    """The rest of stderr, and the exit code."""
    assert process.stderr is not None
    return process.stderr.read(), process.wait()
