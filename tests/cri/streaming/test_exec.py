"""Tests exec with Go's clients over each SPDY and WebSocket protocol of kubectl and crictl."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cri.streaming.conftest import GoExec
from tests.cri.streaming.processes import ProcessBackend

SPDY = ["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"]
WEBSOCKET = ["websocket v5.channel.k8s.io", "websocket v4.channel.k8s.io"]
WITH_STATUS = [SPDY[0], *WEBSOCKET]
WITH_HALF_CLOSE = [*SPDY[:3], WEBSOCKET[0]]
WITH_RESIZE = [*SPDY[:2], *WEBSOCKET]
FAILED = 250


@pytest.mark.requirement("9.4")
@pytest.mark.parametrize("protocol", [*SPDY, *WEBSOCKET])
async def test_stdout_and_stderr_arrive_separately(go: GoExec, protocol: str) -> None:
    outcome = await go("echo out; echo err >&2", protocol=protocol)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, b"out\n", b"err\n")


@pytest.mark.requirement("9.5")
@pytest.mark.parametrize("protocol", WITH_STATUS)
@pytest.mark.parametrize(
    ("command", "code"), [("exit 1", 1), ("exit 200", 200), ("kill -KILL $$", 137)]
)
async def test_the_exit_code_is_reported(
    go: GoExec, protocol: str, command: str, code: int
) -> None:
    assert (await go(command, protocol=protocol)).exit_code == code


# Not v1: Go's v1 client takes the end of the outputs or the text, whichever comes first.
@pytest.mark.parametrize("protocol", SPDY[1:3])
async def test_old_clients_get_the_status_as_text(go: GoExec, protocol: str) -> None:
    outcome = await go("exit 3", protocol=protocol)
    assert outcome.exit_code == FAILED
    assert b"exit code 3" in outcome.stderr


@pytest.mark.requirement("9.7")
@pytest.mark.parametrize("protocol", WITH_HALF_CLOSE)
async def test_end_of_stdin_reaches_the_process(go: GoExec, protocol: str) -> None:
    outcome = await go("cat; echo end", b"some\ninput\n", protocol=protocol)
    assert (outcome.exit_code, outcome.stdout) == (0, b"some\ninput\nend\n")


@pytest.mark.requirement("9.7")
@pytest.mark.parametrize("protocol", [*SPDY, *WEBSOCKET])
async def test_the_exit_ends_a_session_with_open_stdin(go: GoExec, protocol: str) -> None:
    process = await go.start("read line; echo got $line", stdin=True, protocol=protocol)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"this\n")
    async with asyncio.timeout(60):
        assert await process.stdout.read() == b"got this\n"
        assert await process.wait() == 0
    process.stdin.close()


@pytest.mark.requirement("9.6")
@pytest.mark.parametrize("protocol", WITH_RESIZE)
async def test_a_session_has_a_terminal_of_the_requested_size(go: GoExec, protocol: str) -> None:
    process = await go.start(
        'while [ "$(stty size)" != "17 91" ]; do sleep 0.02; done; stty size; exit 4',
        stdin=True,
        tty=True,
        sizes="91x17",
        protocol=protocol,
    )
    async with asyncio.timeout(60):
        stdout, _ = await process.communicate(None)
    code = 4 if protocol in WITH_STATUS else FAILED
    assert (process.returncode, stdout) == (code, b"17 91\r\n")


async def test_control_c_on_a_terminal_sends_sigint(go: GoExec) -> None:
    process = await go.start("echo ready; exec sleep 60", stdin=True, tty=True)
    assert process.stdin is not None and process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"ready\r\n"
        process.stdin.write(b"\x03")
        assert await process.wait() == 130
    process.stdin.close()


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_a_hundred_megabytes_of_output_arrive(
    go: GoExec, protocol: str, large: Callable[[int], tuple[Path, str]]
) -> None:
    path, digest = large(100)
    outcome = await go(f"cat {path}; exit 9", protocol=protocol)
    assert hashlib.sha256(outcome.stdout).hexdigest() == digest
    assert outcome.exit_code == 9


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_a_hundred_megabytes_of_input_arrive(
    go: GoExec, protocol: str, large: Callable[[int], tuple[Path, str]]
) -> None:
    path, digest = large(100)
    outcome = await go("sha256sum", path.read_bytes(), protocol=protocol)
    assert outcome.stdout.split() == [digest.encode(), b"-"]


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_data_flows_in_both_directions_at_once(
    go: GoExec, protocol: str, large: Callable[[int], tuple[Path, str]]
) -> None:
    path, digest = large(32)
    outcome = await go("cat", path.read_bytes(), protocol=protocol)
    assert hashlib.sha256(outcome.stdout).hexdigest() == digest


async def test_a_client_that_does_not_read_slows_the_process(
    go: GoExec, backend: ProcessBackend
) -> None:
    reading, writing = os.pipe()
    process = await go.start("head -c 200000000 /dev/zero", stdout_fd=writing)
    os.close(writing)
    await asyncio.sleep(1)
    assert not backend.sessions[0].closed.is_set()
    total = 0
    with os.fdopen(reading, "rb") as file:
        while data := await asyncio.to_thread(file.read1, 1 << 20):
            total += len(data)
    assert total == 200_000_000
    assert await process.wait() == 0
    assert process.stderr is not None and not await process.stderr.read()


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_a_process_that_does_not_read_stdin_slows_the_client(
    go: GoExec, backend: ProcessBackend, protocol: str
) -> None:
    """When the waiting client is killed, the server kills the process, too, although it does not
    read from the connection meanwhile."""
    with open("/dev/zero", "rb") as zero:
        process = await go.start(
            "exec sleep 60", stdin=True, stdin_fd=zero.fileno(), protocol=protocol
        )
        await asyncio.sleep(1)
        process.kill()
        await process.wait()
    async with asyncio.timeout(30):
        await backend.sessions[0].closed.wait()


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_a_process_that_closes_stdin_does_not_stop_the_client(
    go: GoExec, protocol: str
) -> None:
    outcome = await go("exec <&-; sleep 0.3; echo done", bytes(1 << 22), protocol=protocol)
    assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")


@pytest.mark.parametrize("protocol", [SPDY[0], WEBSOCKET[0]])
async def test_an_exec_dies_with_its_client(
    go: GoExec, backend: ProcessBackend, protocol: str
) -> None:
    process = await go.start("echo ready; sleep 60 & sleep 60", protocol=protocol)
    assert process.stdout is not None
    await process.stdout.readline()
    process.kill()
    await process.wait()
    async with asyncio.timeout(30):
        await backend.sessions[0].closed.wait()


@pytest.mark.requirement("9.7")
async def test_a_grandchild_with_an_open_output_does_not_delay_the_end(go: GoExec) -> None:
    async with asyncio.timeout(30):
        outcome = await go("sleep 60 & echo done")
    assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")


async def test_many_sessions_run_at_once(go: GoExec) -> None:
    outcomes = await asyncio.gather(*(go(f"cat; exit {n}", b"%d" % n) for n in range(1, 25)))
    assert [(o.exit_code, o.stdout) for o in outcomes] == [(n, b"%d" % n) for n in range(1, 25)]
