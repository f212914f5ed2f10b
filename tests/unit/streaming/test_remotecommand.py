"""Tests sessions over pipes and ptys: the copied data, the end of the streams, and the client's
status."""

from __future__ import annotations

import asyncio
import json
import os
import pty
from dataclasses import dataclass, field

import pytest

from cri_server.streaming import remotecommand
from cri_server.streaming.backend import StreamingSession
from cri_server.streaming.remotecommand import CommandStreams
from cri_server.streaming.streams import Budget, Inbound, StreamGone
from pyrunc.errors import Error, NotFound, PeerError, WrongState


class Out:
    """The client's end of an output stream; each write takes `slow_s`."""

    def __init__(self, log: list[str], name: str, slow_s: float = 0) -> None:
        self.log, self.name, self.slow_s = log, name, slow_s
        self.data, self.gone = b"", False

    async def write(self, data: bytes) -> None:
        if self.gone:
            raise StreamGone
        await asyncio.sleep(self.slow_s)
        self.data += data
        if self.log[-1:] != [self.name]:
            self.log.append(self.name)

    async def end(self) -> None:
        self.log.append(f"end of {self.name}")


@dataclass
class Client:
    """The client's end of a session: its streams, and the data that arrived, in order."""

    log: list[str] = field(default_factory=list)
    json_status: bool = True

    def __post_init__(self) -> None:
        budget = Budget()
        self.stdin, self.resize = Inbound(budget), Inbound(budget)
        self.stdout, self.stderr, self.error = (
            Out(self.log, name) for name in ("stdout", "stderr", "error")
        )

    @property
    def streams(self) -> CommandStreams:
        resize: asyncio.Future[Inbound] = asyncio.get_running_loop().create_future()
        resize.set_result(self.resize)
        return CommandStreams(
            self.error, self.json_status, self.stdin, self.stdout, self.stderr, resize
        )

    @property
    def status(self) -> dict[str, object]:
        return json.loads(self.error.data)  # type: ignore[no-any-return]


class Process(StreamingSession):
    """A session in which the test plays the process: it has the other ends of the pipes and sets
    the exit code."""

    def __init__(self) -> None:
        (self.its_stdin, stdin), (stdout, self.its_stdout), (stderr, self.its_stderr) = (
            os.pipe() for _ in range(3)
        )
        super().__init__(stdin, stdout, stderr)
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.sizes: list[tuple[int, int]] = []
        self.closed = 0

    async def resize(self, width: int, height: int) -> None:
        self.sizes.append((width, height))

    async def wait(self) -> int:
        return await asyncio.shield(self.exited)

    async def close(self) -> None:
        self.closed += 1
        self.close_descriptors()

    def exit(self, code: int, *, keep_output: bool = False) -> None:
        os.close(self.its_stdin)
        if not keep_output:
            os.close(self.its_stdout)
            os.close(self.its_stderr)
        self.exited.set_result(code)


async def opened(process: Process) -> Process:
    return process


@pytest.mark.requirement("9.5")
async def test_the_status_follows_the_output_and_precedes_the_end() -> None:
    client, process = Client(), Process()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    os.write(process.its_stdout, b"out")
    os.write(process.its_stderr, b"err")
    process.exit(3)
    await asyncio.wait_for(running, 60)
    assert (client.stdout.data, client.stderr.data) == (b"out", b"err")
    assert sorted(client.log[:2]) == ["stderr", "stdout"]
    assert client.log[2:] == ["error", "end of error", "end of stdout", "end of stderr"]
    assert client.status["reason"] == "NonZeroExitCode"
    assert client.status["details"] == {"causes": [{"reason": "ExitCode", "message": "3"}]}
    assert process.closed == 1


async def test_exit_code_0_is_reported_as_success() -> None:
    client, process = Client(), Process()
    process.exit(0)
    await asyncio.wait_for(remotecommand.run(opened(process), client.streams), 60)
    assert client.status == {"metadata": {}, "status": "Success"}


@pytest.mark.requirement("9.5")
@pytest.mark.parametrize(("code", "text"), [(0, b""), (2, b"command terminated with exit code 2")])
async def test_old_clients_get_the_status_as_text_or_not_at_all(code: int, text: bytes) -> None:
    client, process = Client(json_status=False), Process()
    process.exit(code)
    await asyncio.wait_for(remotecommand.run(opened(process), client.streams), 60)
    assert client.error.data == text


@pytest.mark.parametrize(
    ("error", "logged"), [(NotFound("container c"), False), (PeerError("container c"), True)]
)
async def test_the_client_gets_the_error_of_a_session_that_cannot_be_opened(
    error: Error, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that the node has caused (`PeerError`) is also logged."""

    async def nothing() -> Process:
        raise error

    client = Client()
    await remotecommand.run(nothing(), client.streams)
    assert (client.status["reason"], client.status["message"]) == ("InternalError", "container c")
    assert [r.getMessage() for r in caplog.records] == (
        ["exec or attach: peer: container c"] if logged else []
    )


async def test_an_internal_error_is_reported_to_the_client() -> None:
    async def broken() -> Process:
        raise RuntimeError("a bug")

    client = Client()
    with pytest.raises(RuntimeError):
        await remotecommand.run(broken(), client.streams)
    assert (client.status["reason"], client.status["message"]) == (
        "InternalError",
        "internal error",
    )


async def test_stdin_is_copied_up_to_its_end() -> None:
    client, process = Client(), Process()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    client.stdin.feed(b"in")
    client.stdin.feed(b"put")
    client.stdin.end()
    assert await asyncio.to_thread(os.read, process.its_stdin, 100) in (b"in", b"input")
    while await asyncio.to_thread(os.read, process.its_stdin, 100):
        pass
    process.exit(0)
    await asyncio.wait_for(running, 60)


async def test_a_client_that_disconnects_closes_the_session() -> None:
    client, process = Client(), Process()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert process.closed == 1
    process.exit(0)


async def test_a_client_may_disconnect_while_the_session_opens() -> None:
    process, gate = Process(), asyncio.Event()

    async def slowly() -> Process:
        await gate.wait()
        return process

    running = asyncio.create_task(remotecommand.run(slowly(), Client().streams))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    gate.set()
    async with asyncio.timeout(60):
        while not process.closed:
            await asyncio.sleep(0.01)
    assert process.closed == 1
    process.exit(0)


async def test_a_dropped_output_does_not_block_the_process() -> None:
    client, process = Client(), Process()
    client.stdout.gone = True
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    await asyncio.wait_for(asyncio.to_thread(os.write, process.its_stdout, bytes(1_000_000)), 60)
    process.exit(0)
    await asyncio.wait_for(running, 60)


async def test_an_output_that_stays_open_after_the_exit_is_ended() -> None:
    client, process = Client(), Process()
    os.write(process.its_stdout, b"before")
    process.exit(0, keep_output=True)
    await asyncio.wait_for(remotecommand.run(opened(process), client.streams), 60)
    assert client.stdout.data == b"before"
    os.close(process.its_stdout)
    os.close(process.its_stderr)


async def test_a_slow_client_gets_all_that_was_written_before_the_exit() -> None:
    client, process = Client(), Process()
    client.stdout.slow_s = 0.6
    os.write(process.its_stdout, b"x" * 60_000)
    process.exit(0)
    await asyncio.wait_for(remotecommand.run(opened(process), client.streams), 60)
    assert len(client.stdout.data) == 60_000


async def test_endless_output_after_the_exit_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotecommand, "DRAIN_S", 0.2)
    client, process = Client(), Process()
    stop = asyncio.Event()

    async def chatter() -> None:
        os.set_blocking(process.its_stdout, False)
        while not stop.is_set():
            try:
                os.write(process.its_stdout, bytes(65536))
            except BlockingIOError:
                pass
            await asyncio.sleep(0)

    chattering = asyncio.create_task(chatter())
    process.exit(0, keep_output=True)
    await asyncio.wait_for(remotecommand.run(opened(process), client.streams), 60)
    stop.set()
    await asyncio.gather(chattering, return_exceptions=True)
    os.close(process.its_stdout)
    os.close(process.its_stderr)


@pytest.mark.requirement("9.6")
async def test_terminal_sizes_are_applied() -> None:
    client, process = Client(), Process()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    for text in (
        b'{"Width":80,"Height":24}\n',
        b'{"Width":100,',
        b'"Height":40}',
        b' {"width":1,"height":2}{"Width":3,"Height":4}',
    ):
        client.resize.feed(text)
        await asyncio.sleep(0.01)
    client.resize.feed(b'{"Width":0,"Height":5}{"Width":7}')
    async with asyncio.timeout(60):
        while len(process.sizes) < 3:
            await asyncio.sleep(0.01)
    process.exit(0)
    await asyncio.wait_for(running, 60)
    assert process.sizes == [(80, 24), (100, 40), (3, 4)]


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"Width":' * 5000, b"x" * 5000, b'"' + b"x" * 5000, b"1" * 5000]
)
async def test_invalid_terminal_sizes_are_not_stored(text: bytes) -> None:
    client, process = Client(), Process()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    client.resize.feed(text)
    await asyncio.sleep(0.02)
    client.resize.feed(text)
    process.exit(0)
    await asyncio.wait_for(running, 60)
    assert process.sizes == [] and client.status["status"] == "Success"


async def test_a_failed_resize_does_not_end_the_session() -> None:
    class Deaf(Process):
        async def resize(self, width: int, height: int) -> None:
            raise WrongState("no terminal")

    client, process = Client(), Deaf()
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    client.resize.feed(b'{"Width":80,"Height":24}')
    await asyncio.sleep(0.02)
    process.exit(0)
    await asyncio.wait_for(running, 60)
    assert client.status["status"] == "Success"


async def test_the_end_of_a_pty_ends_the_output() -> None:
    client = Client()
    master, slave = pty.openpty()
    process = Process()
    process.close_descriptors()
    process.stdin_fd, process.stdout_fd = os.dup(master), master
    running = asyncio.create_task(remotecommand.run(opened(process), client.streams))
    os.write(slave, b"hello\n")
    os.close(slave)
    process.exit(0)
    await asyncio.wait_for(running, 60)
    assert client.stdout.data == b"hello\r\n"
    assert process.closed == 1
