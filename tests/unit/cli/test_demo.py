"""Tests messages of `pyrunc-cri demo` about a server that does not start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cri_server.cli.connection.client import Client, ServerError
from cri_server.cli.pods import demo


def wait(folder: Path, *command: str) -> str:
    """Start `command`, a server that opens no socket; return the error of waiting for it."""
    (folder / "server.log").write_text("the last line\n")
    with subprocess.Popen(command) as server, Client(f"unix://{folder}/cri.sock") as client:
        try:
            with pytest.raises(ServerError) as raised:
                demo._wait(client, folder, server)
        finally:
            server.kill()
    return str(raised.value)


def test_an_ended_server_is_reported_at_once_with_its_log(tmp_path: Path) -> None:
    error = wait(tmp_path, "sh", "-c", "exit 3")
    assert error == "the server did not start: exit code 3\nthe last line\n"


def test_the_error_distinguishes_a_silent_from_an_ended_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.1)
    error = wait(tmp_path, "sleep", "60")
    assert error == "the server did not start: no reply within 0.1 s\nthe last line\n"
