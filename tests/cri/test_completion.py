"""Tests completion of names in bash, zsh and fish on a terminal; the shell has installed the script
or evaluates it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.cli.main import program
from cri_server.install import shells
from tests.cri.server_harness import IMAGE, REPOSITORY, Server

PATIENCE_S = 60
# Shells without settings of the machine and the user. Each prints READY when it has read the
# script.
COMMANDS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "--no-rcs", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
# FOLDER has the script under the name that the shell looks for; COMPLETION is the command that
# prints it.
INSTALLED = {
    "bash": "source FOLDER/pyrunc-cri",
    "zsh": "fpath=(FOLDER $fpath); autoload -Uz compinit; compinit -D -u",
    "fish": "set -p fish_complete_path FOLDER",
}
EVALUATED = {
    "bash": 'eval "$(COMPLETION)"',
    "zsh": 'autoload -Uz compinit; compinit -D -u; eval "$(COMPLETION)"',
    "fish": "COMPLETION | source",
}
WAYS = {"installed": INSTALLED, "evaluated": EVALUATED}
TO_THE_BEGINNING = "\x01"


class Terminal:
    """A shell on a terminal."""

    def __init__(self, shell: str, environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = ""
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *COMMANDS[shell]],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=REPOSITORY,
            env=environment,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> str:
        """Wait until the shell prints `text`; return the output before it."""
        while text not in self._seen:
            assert select.select([self._ours], [], [], PATIENCE_S)[0], (
                f"{text!r} does not come: {self._seen!r}"
            )
            self._seen += os.read(self._ours, 4096).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture(scope="module")
def web(module_server: Server) -> Iterator[Server]:
    server = module_server
    server.launch(server.run_pod(server.pod_config("web")), server.container_config())
    yield server
    server.remove_all()


@pytest.fixture(
    scope="module", params=[(shell, way) for shell in COMMANDS for way in WAYS], ids="-".join
)
def terminal(
    web: Server, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Terminal]:
    """Start a shell with the completion script and the server's address in its environment."""
    shell, way = request.param
    if not shutil.which(shell):  # tests need this package: CI does not expect a skip
        pytest.skip(f"no {shell} on this machine")
    tmp_path = tmp_path_factory.mktemp(shell)
    command = tmp_path / "bin/pyrunc-cri"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cri_server.cli.main "$@"\n')
    command.chmod(0o755)
    script = tmp_path / Path(shells.path(shell, "pyrunc-cri", "/usr")).name
    script.write_text(shells.script(shell, "pyrunc-cri", program))
    session = Terminal(
        shell,
        {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "TERM": "dumb",
            "PS1": "ready> ",
            "INPUTRC": "/dev/null",
            "PYRUNC_CRI_ADDRESS": f"unix://{web.socket}",
        },
    )
    try:
        environment = {"FOLDER": str(tmp_path), "COMPLETION": f"pyrunc-cri completion {shell}"}
        line = WAYS[way][shell]
        for name, value in environment.items():
            line = line.replace(name, value)
        session.type(f"{line}; echo lo''aded\n")
        session.expect("loaded")
        yield session
    finally:
        session.close()


@pytest.mark.parametrize(
    ("begun", "whole"),
    [
        ("logs we", "web"),
        ("inspectp w", "web"),
        ("inspecti registry.test/bus", IMAGE),
        ("inspecti registry.test/busybox:", IMAGE),
        ("inspecti other x registry.test/busybox:", IMAGE),
        ("ps --state runn", "running"),
        ("install-node --uninst", "--uninstall"),
    ],
)
def test_a_name_is_completed(terminal: Terminal, begun: str, whole: str) -> None:
    # The shell prints the completed line instead of executing it.
    terminal.type(f"pyrunc-cri {begun}\t{TO_THE_BEGINNING}printf '<%s>' \n")
    terminal.expect(f"<{whole}>")
