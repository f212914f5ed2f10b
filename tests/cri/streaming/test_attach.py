"""Tests attach with Go's client: input, output, exit codes, terminals, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cri_server.streaming.backend import AttachOptions, ExecSessionOptions
from cri_server.streaming.server import StreamingServer
from tests.cri.streaming.processes import ProcessBackend, ProcessSession, start


@pytest.fixture
async def shell(backend: ProcessBackend, server: StreamingServer) -> AsyncIterator[ProcessSession]:
    """Provide a shell as a container's main process."""
    session = backend.containers["c"] = start(
        ExecSessionOptions("c", ("/bin/sh",), stdin=True, stdout=True, stderr=True)
    )
    yield session
    await session.close()


async def seat(
    goclient: Path, server: StreamingServer, container: str, *streams: str
) -> asyncio.subprocess.Process:
    options = AttachOptions(container, **dict.fromkeys(streams, True))
    arguments = [
        "exec",
        "-url",
        server.url_for(options),
        *(f"-{stream}" for stream in streams),
    ]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        goclient, *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )


async def test_attach_carries_input_output_and_the_exit_code(
    goclient: Path, server: StreamingServer, shell: ProcessSession
) -> None:
    process = await seat(goclient, server, "c", "stdin", "stdout", "stderr")
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate(b"echo hello; echo oh >&2; exit 5\n")
    assert (process.returncode, stdout, stderr) == (5, b"hello\n", b"oh\n")


async def test_the_process_continues_when_a_client_leaves(
    goclient: Path, server: StreamingServer, shell: ProcessSession
) -> None:
    first = await seat(goclient, server, "c", "stdin", "stdout")
    assert first.stdin is not None and first.stdout is not None
    first.stdin.write(b"echo first\n")
    async with asyncio.timeout(60):
        assert await first.stdout.readline() == b"first\n"
        first.kill()
        await first.wait()
        second = await seat(goclient, server, "c", "stdin", "stdout")
        assert await second.communicate(b"echo second; exit\n") == (b"second\n", b"")


async def test_an_unknown_container_is_an_error(goclient: Path, server: StreamingServer) -> None:
    process = await seat(goclient, server, "nobody", "stdout")
    async with asyncio.timeout(60):
        _, stderr = await process.communicate()
    assert process.returncode == 250
    assert b"container nobody" in stderr


async def test_a_client_without_a_resize_stream_can_attach_to_a_terminal(
    goclient: Path, server: StreamingServer, backend: ProcessBackend
) -> None:
    options = ExecSessionOptions(
        "t", ("/bin/sh", "-c", "read line; echo got $line"), stdin=True, stdout=True, tty=True
    )
    session = backend.containers["t"] = start(options)
    url = server.url_for(AttachOptions("t", stdin=True, stdout=True, tty=True))
    pipe = asyncio.subprocess.PIPE
    # Without -tty the client does not know of the terminal and opens no stream for its size.
    process = await asyncio.create_subprocess_exec(
        goclient, "exec", "-url", url, "-stdin", "-stdout", stdin=pipe, stdout=pipe
    )
    async with asyncio.timeout(60):
        stdout, _ = await process.communicate(b"x\n")
    assert (process.returncode, stdout.splitlines()[-1]) == (0, b"got x")
    await session.close()
