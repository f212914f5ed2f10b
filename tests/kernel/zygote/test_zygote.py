"""Tests the zygote with real processes: what a child inherits, how jobs end, and which processes
survive others."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from cri_server.zygote import jobs
from cri_server.zygote.client import JobResult, Zygote
from cri_server.zygote.peer import wait_answer
from cri_server.zygote.workers import Workers
from pyrunc import ipc
from pyrunc.errors import DeadlineExceeded, InvalidArgument, NotFound, PeerError, Unavailable
from pyrunc.zygote.preload import INHERITED_FROM
from tests.kernel.shim.pod import TIMEOUT_S, children, descriptors, gone
from tests.kernel.zygote.functions import Question, WhoAreYou
from tests.support.processes import wait_until
from tests.support.zygotes import start_zygote

HERE = "tests.kernel.zygote.functions"


@pytest_asyncio.fixture
async def zygote() -> AsyncIterator[Zygote]:
    started = await start_zygote([HERE])
    yield started
    await started.close()


async def until_gone(pids: list[int], timeout_s: float = TIMEOUT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not all(map(gone, pids)):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


async def detached(zygote: Zygote) -> tuple[int, socket.socket, list[str]]:
    """Starts a detached child that answers on a socket; returns its pid, the socket and its first
    message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid = await zygote.fork(f"{HERE}:answer_on", None, [theirs.fileno()])
    ours.settimeout(TIMEOUT_S)
    return pid, ours, ours.recv(100).decode().split()


# -- jobs


async def test_a_job_has_stdin_environment_arguments_and_descriptors(zygote: Zygote) -> None:
    reading, writing = os.pipe()
    result = await zygote.run(
        f"{HERE}:echo", Question(say="hi ", code=3), [writing], stdin=b"there", env={"EXTRA": "!"}
    )
    os.close(writing)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"hi there!", b"to stderr")
    assert os.read(reading, 100) == b"to a descriptor"
    os.close(reading)


async def test_a_job_has_no_descriptor_but_its_own(zygote: Zygote) -> None:
    result = await zygote.run(f"{HERE}:descriptors", fds=[0, 1])
    ours = set(eval(result.stdout)) - {6, 7}  # the listing itself
    assert ours == {0, 1, 2, 3, 4, 5}  # stdio, the result socket, two that were passed


async def test_a_job_returns_descriptors(zygote: Zygote) -> None:
    result = await zygote.run_for_fd(f"{HERE}:hand_over")
    assert [os.read(fd, 100) for fd in result.fds] == [b"from the job"]
    for fd in result.fds:
        os.close(fd)


@pytest.mark.parametrize(("function", "code"), [("leave", 7), ("die", 137), ("crash", 1)])
async def test_a_job_returns_its_exit_code(zygote: Zygote, function: str, code: int) -> None:
    result = await zygote.run(f"{HERE}:{function}")
    assert result.exit_code == code
    assert (b"ZeroDivisionError: a bug" in result.stderr) == (function == "crash")


async def test_errors_of_a_job_are_raised_in_the_server(zygote: Zygote) -> None:
    with pytest.raises(NotFound, match="no such thing"):
        await zygote.run(f"{HERE}:refuse")


async def test_a_job_may_execute_another_program(zygote: Zygote) -> None:
    result = await zygote.run(
        f"{HERE}:replace", Question(script="cat; echo error >&2; exit 9"), stdin=b"in"
    )
    assert (result.exit_code, result.stdout, result.stderr) == (9, b"in", b"error\n")


async def test_a_function_that_does_not_exist_is_an_error_and_no_process(zygote: Zygote) -> None:
    for function in (f"{HERE}:nothing", "no.such.module:main"):
        with pytest.raises(PeerError):
            await zygote.run(function)
        with pytest.raises(PeerError):
            await zygote.fork(function)


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ({"call": "fork", "arguments": {}}, "fork: function is missing"),
        (
            {"call": "run", "function": f"{HERE}:leave", "arguments": {}},
            "run: environment is missing",
        ),
        ({"call": "fork", "function": 1, "arguments": {}}, "fork: function is 1, not a text"),
        ({"call": "brew"}, "the zygote has no call 'brew'"),
    ],
)
async def test_an_error_names_the_missing_field_of_a_request(
    zygote: Zygote, question: ipc.Message, problem: str
) -> None:
    process = await zygote._live()
    with pytest.raises(InvalidArgument, match=problem):
        await wait_answer(process.peer.ask(question)[1])
    assert (await zygote.run(f"{HERE}:leave")).exit_code == 7


async def test_jobs_accept_large_input_output_and_arguments(zygote: Zygote) -> None:
    text = "x" * 300_000
    result = await zygote.run(f"{HERE}:echo", Question(say=text), stdin=b"y" * 2_000_000)
    assert result.stdout == text.encode() + b"y" * 2_000_000


async def test_output_beyond_the_limit_is_dropped_and_the_job_continues(zygote: Zygote) -> None:
    result = await zygote.run(f"{HERE}:flood", Question(blocks=100), output_limit_bytes=100_000)
    assert (result.exit_code, len(result.stdout)) == (0, 100_000)


async def test_many_jobs_run_at_once(zygote: Zygote) -> None:
    async def one(n: int) -> bytes:
        return (await zygote.run(f"{HERE}:echo", Question(say=str(n)))).stdout

    assert await asyncio.gather(*map(one, range(50))) == [str(n).encode() for n in range(50)]


async def test_a_timeout_kills_all_processes_of_the_job(zygote: Zygote, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        # The timeout is long enough for all three processes to start; they would sleep for 100 s.
        await zygote.run(f"{HERE}:family", Question(file=str(pids)), timeout_s=2.5)
    assert 2.5 <= time.monotonic() - started < 25
    family = [int(pid) for pid in pids.read_text().split()]
    assert len(family) == 3
    assert await until_gone(family)


async def test_a_deadline_may_be_years_away(zygote: Zygote) -> None:
    assert (await zygote.run(f"{HERE}:leave", timeout_s=1e12)).exit_code == 7


async def test_a_cancellation_kills_all_processes_of_the_job(
    zygote: Zygote, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    task = asyncio.create_task(zygote.run(f"{HERE}:family", Question(file=str(pids))))
    while not pids.exists() or len(pids.read_text().split()) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await until_gone([int(pid) for pid in pids.read_text().split()])
    assert (await zygote.run(f"{HERE}:leave")).exit_code == 7


async def test_a_process_that_keeps_stdout_open_does_not_delay_the_result(
    zygote: Zygote,
) -> None:
    started = time.monotonic()
    result = await zygote.run(f"{HERE}:background")
    assert time.monotonic() - started < 20  # it sleeps for 100
    assert await until_gone([int(result.stdout)])


# -- detached children


async def test_a_detached_child_has_its_own_session_and_outlives_server_and_zygote(
    zygote: Zygote,
) -> None:
    pid, sock, (its_pid, session, parent) = await detached(zygote)
    assert (int(its_pid), int(session), int(parent)) == (pid, pid, zygote.pid)
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGKILL)
    assert await until_gone([zygote.pid])
    sock.send(b"still there?")
    assert sock.recv(100).split()[1] == b"still"
    sock.close()
    assert await until_gone([pid])


async def test_a_detached_child_has_null_stdio_and_its_descriptor(zygote: Zygote) -> None:
    pid, sock, _ = await detached(zygote)
    links = {int(n): os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    assert {n: links[n] for n in (0, 1, 2)} == dict.fromkeys((0, 1, 2), "/dev/null")
    assert set(links) == {0, 1, 2, 3} and links[3].startswith("socket:")
    sock.close()
    assert await until_gone([pid])


async def test_the_zygote_reaps_its_detached_children(zygote: Zygote) -> None:
    pid, sock, _ = await detached(zygote)
    sock.close()
    await _until(lambda: not os.path.exists(f"/proc/{pid}"))


# -- the zygote itself


async def test_a_zygote_ends_with_its_server_and_kills_jobs_but_not_detached_children(
    tmp_path: Path,
) -> None:
    zygote = await start_zygote([HERE])
    zygote_pid = zygote.pid
    assert zygote_pid
    pid, sock, _ = await detached(zygote)
    pids = tmp_path / "pids"
    job = asyncio.create_task(zygote.run(f"{HERE}:family", Question(file=str(pids))))
    while not pids.exists() or len(pids.read_text().split()) < 3:
        await asyncio.sleep(0.01)
    await zygote.close()
    with pytest.raises(PeerError):
        await job
    assert await until_gone([zygote_pid, *map(int, pids.read_text().split())])
    sock.send(b"alive")
    assert b"alive" in sock.recv(100)
    sock.close()
    assert await until_gone([pid])


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_jobs_of_a_killed_zygote_end_and_the_zygote_is_replaced(zygote: Zygote) -> None:
    first = zygote.pid
    assert first
    job = asyncio.create_task(zygote.run(f"{HERE}:replace", Question(script="exec sleep 100")))
    await _until(lambda: bool(children(first)))
    below = children(first)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(PeerError, match="has ended"):
        await job
    assert await until_gone(below)
    assert (await zygote.run(f"{HERE}:leave")).exit_code == 7
    assert zygote.pid not in (None, first)


async def replaced_with_a_job(zygote: Zygote, go: Path) -> tuple[int, asyncio.Task[JobResult]]:
    """Replace the zygote while it has a job that reads the pipe `go`. Return the old zygote's pid
    and the job."""
    old = zygote.pid
    assert old is not None
    os.mkfifo(go)
    job = asyncio.create_task(zygote.run(f"{HERE}:read", Question(file=str(go))))
    assert await asyncio.to_thread(wait_until, lambda: children(old), TIMEOUT_S)
    await zygote.renew()
    return old, job


async def test_a_job_continues_when_its_zygote_is_replaced(zygote: Zygote, tmp_path: Path) -> None:
    go = tmp_path / "go"
    old, job = await replaced_with_a_job(zygote, go)
    assert zygote.pid not in (None, old)
    assert (await zygote.run(f"{HERE}:leave")).exit_code == 7
    await asyncio.to_thread(go.write_text, "go on")
    assert (await job).stdout == b"go on"
    assert await until_gone([old])


async def test_a_replaced_zygote_that_has_jobs_ends_with_the_server(
    zygote: Zygote, tmp_path: Path
) -> None:
    old, job = await replaced_with_a_job(zygote, tmp_path / "go")
    await zygote.close()
    with pytest.raises(Unavailable):
        await job
    assert await until_gone([old])


async def test_an_idle_worker_ends_when_its_zygote_is_replaced(zygote: Zygote) -> None:
    workers = Workers(zygote, f"{HERE}:serve", "a test worker", 1)
    before = await process_of_worker(workers)
    assert await process_of_worker(workers) == before
    await zygote.renew()
    assert await until_gone([before])
    assert await process_of_worker(workers) != before
    workers.close()


async def process_of_worker(workers: Workers) -> int:
    fields, _ = await workers.ask(WhoAreYou(), TIMEOUT_S)
    return int(fields["pid"])


async def test_a_job_inherits_no_descriptor_that_shims_inherit() -> None:
    zygote = await start_zygote(["pyrunc.shim.main", HERE])
    result = await zygote.run(f"{HERE}:descriptors", fds=[0, 1])
    await zygote.close()
    assert max(eval(result.stdout)) < INHERITED_FROM


async def test_a_failed_preload_is_reported() -> None:
    with pytest.raises(PeerError, match=r"importing no\.such\.module: ModuleNotFoundError"):
        await start_zygote(["no.such.module"])


async def test_a_request_waits_for_a_starting_zygote() -> None:
    zygote = Zygote([HERE])
    zygote.begin()
    try:
        assert zygote.pid is None
        assert (await zygote.run(f"{HERE}:leave")).exit_code == 7
        await zygote.ready()
        assert zygote.pid is not None
    finally:
        await zygote.close()


async def test_a_request_to_a_zygote_that_cannot_start_gets_the_reason() -> None:
    zygote = Zygote(["no.such.module"])
    zygote.begin()
    for _ in range(2):
        with pytest.raises(PeerError, match=r"importing no\.such\.module"):
            await zygote.run(f"{HERE}:leave")
    with pytest.raises(PeerError, match=r"importing no\.such\.module"):
        await zygote.ready()
    await zygote.close()


async def test_a_zygote_closed_during_its_start_leaves_no_process() -> None:
    before = set(children(os.getpid()))
    zygote = Zygote([HERE])
    zygote.begin()
    await _until(lambda: bool(set(children(os.getpid())) - before))
    await zygote.close()
    assert set(children(os.getpid())) == before
    with pytest.raises(Unavailable, match="closed"):
        await zygote.run(f"{HERE}:leave")


@pytest.mark.parametrize(
    "function", ["hand_over_many", "hand_over_with_an_error", "hand_over_nonsense"]
)
async def test_unexpected_descriptors_of_a_job_are_closed(zygote: Zygote, function: str) -> None:
    """A compromised job cannot exhaust the server's limit of descriptors, although it can send 250
    with any message."""
    before = descriptors(os.getpid())
    for run in (zygote.run, zygote.run_for_fd):
        with pytest.raises((PeerError, NotFound)):
            await run(f"{HERE}:{function}")
    assert descriptors(os.getpid()) <= before


async def test_a_jobs_message_in_a_memfd_is_not_read(zygote: Zygote) -> None:
    before = descriptors(os.getpid())
    # The server would parse up to 64 MiB of a compromised job's choice in its event loop.
    with pytest.raises(PeerError, match="was truncated"):
        await zygote.run(f"{HERE}:send_memfd")
    assert descriptors(os.getpid()) <= before


async def test_a_long_error_text_is_cut(zygote: Zygote) -> None:
    with pytest.raises(NotFound) as raised:
        await zygote.run(f"{HERE}:refuse_at_length")
    assert raised.value.message.startswith("\u20ac\u20ac") and len(raised.value.message) == 1000


async def test_a_zygote_killed_during_its_imports_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "killed_once.py").write_text(
        f"import os, pathlib\nmark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists():\n    mark.touch()\n    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    zygote = await start_zygote(["killed_once"])
    assert mark.exists() and zygote.pid is not None
    await zygote.close()


async def test_a_hundred_jobs_leave_nothing_in_the_zygote(zygote: Zygote) -> None:
    await zygote.run(f"{HERE}:leave")
    pid = zygote.pid
    assert pid
    await _until(lambda: not children(pid))
    before = descriptors(pid)
    for _ in range(100):
        await zygote.run(f"{HERE}:echo", Question(say="x"))
        result = await zygote.run_for_fd(f"{HERE}:hand_over")
        for fd in result.fds:
            os.close(fd)
    await _until(lambda: descriptors(pid) <= before and not children(pid))


@pytest.mark.parametrize("module", ["json", "no.such.module"])
def test_a_zygote_whose_server_ends_during_the_imports_exits_without_an_error(module: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    command = [
        sys.executable,
        "-m",
        "pyrunc.zygote",
        str(theirs.fileno()),
        ":".join(sys.path),
        module,
    ]
    done = subprocess.run(
        command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60, check=False
    )
    theirs.close()
    assert done.returncode == 0 and "BrokenPipe" not in done.stderr


def test_a_zygote_whose_server_ends_with_an_unread_reply_exits_without_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "pyrunc.zygote", str(theirs.fileno()), ":".join(sys.path)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        theirs.close()
        assert select.select([ours], [], [], 30)[0]  # it is ready, and says so
        reading, writing = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        result, its_result = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"id": 1, "call": "run", "function": f"{HERE}:echo", "arguments": {"say": ""}}
        ipc.send(
            ours,
            {**request, "environment": {}, "timeout_s": None},
            [reading, null, null, its_result.fileno()],
        )
        os.close(reading)
        os.close(null)
        its_result.close()
        assert wait_until(lambda: children(process.pid), TIMEOUT_S)
        (job,) = children(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.close(writing)
        assert wait_until(lambda: gone(job), TIMEOUT_S)
        # The unread reply makes the kernel reset the connection, so the zygote's next reply, the
        # job's end, fails with ECONNRESET.
        ours.close()
        result.close()
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=30)[1] == b"" and process.returncode == 0


@pytest.mark.parametrize("reused", [False, True])
def test_a_dial_into_an_ended_pod_says_so(reused: bool) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    request = jobs.DialRequest(port=1, pid=os.getpid() if reused else ended.pid, start_time=1)
    with pytest.raises(PeerError, match="the pod has ended"):
        jobs.dial(request.to_fields(), [])
