"""How tests call the client's verbs: in this process, which is fast, or as a program in the server's network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from cri_server.cli.main import program
from pyrunc.errors import Error
from tests.cri.server_harness import Server


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


def call(server: Server | str, *words: str, stdin: bytes | str | None = None, **environment: str) -> Said:
    """Run a verb in this process: without a terminal."""
    address = server if isinstance(server, str) else f"unix://{server.socket}"
    done = CliRunner().invoke(program, ["--address", address, *words], input=stdin, env=environment)
    if done.exception is not None and not isinstance(
        done.exception, SystemExit | Error | click.ClickException
    ):
        raise done.exception
    error = str(done.exception) if isinstance(done.exception, Error) else ""
    return Said(done.stdout, done.stderr, 1 if error else done.exit_code, error)


def ok(server: Server | str, *words: str, stdin: bytes | str | None = None, **environment: str) -> Said:
    """As `call`; it must succeed."""
    said = call(server, *words, stdin=stdin, **environment)
    assert said.code == 0, said
    return said
