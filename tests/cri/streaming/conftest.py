"""Fixtures: a streaming server that runs processes of this machine, and the Go client that kubectl
and crictl use."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cri_server.streaming.backend import ExecSessionOptions
from cri_server.streaming.server import StreamingServer
from tests.cri.streaming.processes import ProcessBackend
from tests.support.goclient.build import goclient as build_goclient


@pytest.fixture
def backend() -> ProcessBackend:
    return ProcessBackend()


@pytest.fixture
async def server(backend: ProcessBackend) -> AsyncIterator[StreamingServer]:
    """Provide a listening server; assert after the test that no task and no session is left."""
    before = asyncio.all_tasks()
    server = StreamingServer(backend)
    await server.start()
    yield server
    await server.close()
    async with asyncio.timeout(30):
        for session in (*backend.sessions, *backend.containers.values()):
            await session.closed.wait()
        while asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def goclient() -> Path:
    return build_goclient()


@dataclass
class Outcome:
    """The exit code and output of a Go client."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class GoExec:
    """Runs the Go client, which executes a shell command through the streaming server."""

    def __init__(self, program: Path, server: StreamingServer) -> None:
        self._program, self._server = program, server

    async def start(
        self,
        command: str,
        *,
        protocol: str = "v4.channel.k8s.io",
        stdin: bool = False,
        stderr: bool = True,
        tty: bool = False,
        sizes: str = "",
        stdout_fd: int = asyncio.subprocess.PIPE,
        stdin_fd: int = asyncio.subprocess.PIPE,
    ) -> asyncio.subprocess.Process:
        """Start the client. Without `stdin`, its standard input is /dev/null."""
        options = ExecSessionOptions(
            "c",
            ("/bin/sh", "-c", command),
            stdin=stdin,
            stdout=True,
            stderr=stderr and not tty,
            tty=tty,
        )
        arguments = ["exec", "-url", self._server.url_for(options), "-stdout"]
        protocol_name = protocol.removeprefix("websocket ")
        arguments += ["-protocol", protocol_name] + (
            ["-websocket"] if protocol_name != protocol else []
        )
        arguments += [f"-{name}" for name in ("stdin", "stderr", "tty") if getattr(options, name)]
        if sizes:
            arguments += ["-sizes", sizes]
        return await asyncio.create_subprocess_exec(
            self._program,
            *arguments,
            stdin=stdin_fd if stdin else asyncio.subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=asyncio.subprocess.PIPE,
        )

    async def __call__(self, command: str, data: bytes | None = None, **options: object) -> Outcome:
        """Run the client to its end, with `data` as its standard input, or without one."""
        process = await self.start(command, stdin=data is not None, **options)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            stdout, stderr = await process.communicate(data)
        assert process.returncode is not None
        return Outcome(process.returncode, stdout or b"", stderr)


@pytest.fixture
def go(goclient: Path, server: StreamingServer) -> GoExec:
    return GoExec(goclient, server)


@pytest.fixture
def large(tmp_path: Path) -> Callable[[int], tuple[Path, str]]:
    """Return a function that makes a file of n MiB of random bytes and returns (path, SHA-256)."""

    def make(mebibytes: int) -> tuple[Path, str]:
        path, digest = tmp_path / "large", hashlib.sha256()
        with path.open("wb") as file:
            for _ in range(mebibytes):
                block = os.urandom(1 << 20)
                digest.update(block)
                file.write(block)
        return path, digest.hexdigest()

    return make
