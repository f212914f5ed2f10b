"""Tests the shim's streams with real processes: log, attach, exec sessions, terminals."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from cri_server.pod.client import ExecSession, ShimClient
from pyrunc.errors import Error, KernelError, NotFound, PeerError, WrongState
from pyrunc.shim.messages import StartExec
from tests.kernel.shim.pod import (
    TestPod,
    children,
    descriptors,
    gone,
    name_of,
    open_gate,
    read_all,
    read_log,
    read_some,
    settled,
    until,
)

PYTHON = "/usr/bin/python3"


# -- log


@pytest.mark.requirement("11.3")
async def test_lines_of_stdout_and_stderr_are_logged_in_the_order_of_reading(pod: TestPod) -> None:
    script = "for i in 1 2 3; do echo out $i; read x; echo err $i >&2; read x; done"
    await pod.run("a", script, stdin=True)
    attached = await pod.client.attach("a", stdin=True, stdout=False)
    assert attached.stdin_fd is not None
    for count in range(1, 7):
        # The container writes to a stream only after its last line on the other was logged.
        await until(lambda count=count: pod.log_path("a").read_bytes().count(b"\n") == count)
        os.write(attached.stdin_fd, b"\n")
    attached.close()
    await pod.exited("a")
    assert pod.logged("a", "stdout") == b"out 1\nout 2\nout 3\n"
    assert pod.logged("a", "stderr") == b"err 1\nerr 2\nerr 3\n"
    streams = [line.split()[1] for line in pod.log_path("a").read_bytes().splitlines()]
    assert streams == [b"stdout", b"stderr"] * 3


async def test_all_output_before_the_exit_is_logged_before_the_exit_event(
    pod: TestPod,
) -> None:
    for n in range(10):
        await pod.run(f"a{n}", "head -c 3000000 /dev/zero | tr '\\0' x; echo; printf end")
        await pod.exited(f"a{n}")
        assert pod.logged(f"a{n}") == b"x" * 3_000_000 + b"\nend"


async def test_binary_output_and_lines_of_a_megabyte_are_logged_unchanged(
    pod: TestPod, tmp_path: Path
) -> None:
    content = os.urandom(2_000_000).replace(b"\n", b"") + b"\n" + bytes(range(256)) * 100
    (tmp_path / "content").write_bytes(content)
    await pod.run("a", "/bin/cat", str(tmp_path / "content"))
    await pod.exited("a")
    assert pod.logged("a") == content


@pytest.mark.requirement("11.3", "13.11")
async def test_without_a_log_path_the_output_is_discarded_and_never_blocks(pod: TestPod) -> None:
    await pod.run("a", "head -c 5000000 /dev/zero; exit 6", log_path=None)
    assert (await pod.exited("a")).exit_code == 6
    assert not pod.log_path("a").exists()


async def test_a_log_that_cannot_be_opened_fails_the_start(pod: TestPod) -> None:
    pod.container("a", "exit 0", log_path="/proc/no/such/0.log")
    with pytest.raises(KernelError, match="log"):
        await pod.start("a")
    assert pod.exit_record("a")["reason"] == "StartError"


async def test_reopening_the_log_under_load_loses_and_splits_no_line(pod: TestPod) -> None:
    script = (
        "import os, select\n"
        "n = 0\n"
        "while n % 1000 or n < 200000 or not select.select([0], [], [], 0)[0]:\n"
        "    os.write(1, b'line %d\\n' % n)\n"
        "    n += 1\n"
        "os.write(1, b'%d lines' % n)"
    )
    await pod.run("a", PYTHON, "-c", script, stdin=True, stdin_once=True)
    attached = await pod.client.attach("a", stdin=True, stdout=False)
    path, rotated = pod.log_path("a"), []
    while pod.exit_events("a") == []:
        old = path.with_name(f"0.log.{len(rotated)}")
        path.rename(old)
        rotated.append(old)
        try:
            await pod.client.reopen_log("a")
        except WrongState:
            break
        assert path.exists()
        if len(rotated) == 10:  # enough of them: it may end when it has written all that it has to
            attached.close()
    await pod.exited("a")
    *lines, last = b"".join(read_log(part) for part in [*rotated, path] if part.exists()).split(
        b"\n"
    )
    assert len(rotated) >= 10 and len(lines) >= 200_000 and last == b"%d lines" % len(lines)
    assert all(line == b"line %d" % number for number, line in enumerate(lines))


async def test_the_old_log_gets_no_line_after_a_reopen(pod: TestPod) -> None:
    await pod.run("a", "while :; do echo tick; sleep 0.01; done")
    path = pod.log_path("a")
    await until(lambda: path.exists() and path.stat().st_size > 100)
    path.rename(path.with_name("old"))
    await pod.client.reopen_log("a")
    size = path.with_name("old").stat().st_size
    await until(lambda: path.stat().st_size > 100)
    assert path.with_name("old").stat().st_size == size


@pytest.mark.requirement("4.8.1")
async def test_reopening_the_log_of_an_exited_container_is_refused_and_makes_no_file(
    pod: TestPod,
) -> None:
    await pod.run("a", "echo x")
    await pod.exited("a")
    pod.log_path("a").unlink()
    with pytest.raises(WrongState):
        await pod.client.reopen_log("a")
    assert not pod.log_path("a").exists()


@pytest.mark.requirement("11.4")
async def test_a_container_survives_a_full_disk_of_its_log(pod: TestPod) -> None:
    await pod.client.state()
    resource = __import__("resource")
    # A file size limit on the shim stands for the full disk.
    resource.prlimit(pod.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    written = pod.folder / "written"
    script = (
        "import os\n"
        "for i in range(40000): os.write(1, b'%099d\\n' % i)\n"
        f"os.mkdir({str(written)!r})\n"
        "os.read(0, 1)\n"
        "print('end')"
    )
    started = await pod.run("a", PYTHON, "-c", script, stdin=True)
    attached = await pod.client.attach("a", stdin=True, stdout=False)
    await until(lambda: written.exists() and _unread(started.pid) == 0)
    await pod.client.state()  # what was read is logged or lost before the shim answers
    assert pod.log_path("a").stat().st_size <= 100_000
    resource.prlimit(
        pod.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert attached.stdin_fd is not None
    os.write(attached.stdin_fd, b"x")
    assert (await pod.exited("a")).exit_code == 0
    attached.close()
    lines = pod.logged("a").splitlines()
    numbers = [int(line) for line in lines[:-1]]
    # a gap at one place, nothing torn
    assert lines[-1] == b"end" and numbers == list(range(len(numbers)))
    assert b"bytes of log were lost" in pod.logged("a", "stderr")


@pytest.mark.skipif("PYRUNC_GUEST" in os.environ, reason="emulated processors have no speed")
async def test_the_log_is_copied_fast(pod: TestPod) -> None:
    """The shim copies more than 80 MB of a log per second of processor time that the shim uses."""
    total = 200_000_000
    script = (
        f"import os\nb = (b'x' * 99 + b'\\n') * 600\nfor _ in range({total} // len(b)):"
        " os.write(1, b)"
    )
    before_s = _processor_s(pod.pid)
    await pod.run("a", PYTHON, "-c", script)
    await pod.exited("a", 90)
    rate = total / (_processor_s(pod.pid) - before_s) / 1e6
    print(f"{rate:.0f} MB per second of the processor")
    # An idle machine reaches 270.
    assert rate > 80


# -- attach


@pytest.mark.requirement("9.8")
async def test_an_attached_client_gets_new_output_and_the_end_of_output(pod: TestPod) -> None:
    await pod.run("a", "echo before; read x; echo after $x; echo error >&2; exit 2", stdin=True)
    await until(lambda: pod.logged("a") == b"before\n")
    streams = await pod.client.attach("a", stdin=True, stdout=True, stderr=True)
    assert (
        streams.stdin_fd is not None
        and streams.stdout_fd is not None
        and streams.stderr_fd is not None
    )
    os.write(streams.stdin_fd, b"now\n")
    assert await read_all(streams.stdout_fd) == b"after now\n"
    assert await read_all(streams.stderr_fd) == b"error\n"
    assert (await pod.exited("a")).exit_code == 2
    streams.close()
    assert pod.logged("a") == b"before\nafter now\n"


@pytest.mark.requirement("9.8")
async def test_many_clients_attach_to_the_same_container(pod: TestPod) -> None:
    await pod.run("a", "read x; for i in 1 2 3; do echo $x $i; done", stdin=True)
    many = [await pod.client.attach("a", stdin=n == 0, stdout=True) for n in range(20)]
    assert many[0].stdin_fd is not None
    os.write(many[0].stdin_fd, b"go\n")
    for streams in many:
        assert streams.stdout_fd is not None
        assert await read_all(streams.stdout_fd) == b"go 1\ngo 2\ngo 3\n"
        streams.close()


@pytest.mark.requirement("11.4", "11.5")
async def test_a_slow_client_neither_blocks_the_container_nor_other_clients(pod: TestPod) -> None:
    await pod.run("a", "read x; head -c 20000000 /dev/zero | tr '\\0' y; exit 9", stdin=True)
    slow = await pod.client.attach("a", stdout=True)
    quick = await pod.client.attach("a", stdin=True, stdout=True)
    assert quick.stdin_fd is not None and quick.stdout_fd is not None and slow.stdout_fd is not None
    os.write(quick.stdin_fd, b"go\n")
    received = len(await read_all(quick.stdout_fd, 30))
    assert (await pod.exited("a", 30)).exit_code == 9
    rest = len(await read_all(slow.stdout_fd))
    # the buffer and the pipe; what came while they were full is skipped
    assert 1_000_000 < rest < 3_000_000
    assert received > 1_000_000
    assert len(pod.logged("a")) == 20_000_000
    slow.close()
    quick.close()


async def test_a_client_that_disconnects_changes_nothing(pod: TestPod) -> None:
    await pod.run("a", "while read x; do echo got $x; done; exit 3", stdin=True)
    before = await settled(pod, running=1)
    for n in range(20):
        streams = await pod.client.attach("a", stdin=True, stdout=True)
        assert streams.stdin_fd is not None and streams.stdout_fd is not None
        os.write(streams.stdin_fd, b"%d\n" % n)
        assert await read_some(streams.stdout_fd) == b"got %d\n" % n
        streams.close()
    await until(lambda: descriptors(pod.pid) <= before)
    await pod.client.stop("a", 15, 0)


@pytest.mark.requirement("4.1.6")
async def test_stdin_once_closes_stdin_with_the_first_client(pod: TestPod) -> None:
    await pod.run("once", "/bin/cat", stdin=True, stdin_once=True)
    await pod.run("always", "/bin/cat", stdin=True)
    for name in ("once", "always"):
        streams = await pod.client.attach(name, stdin=True, stdout=True)
        assert streams.stdin_fd is not None
        os.write(streams.stdin_fd, b"x" * 100_000 + b"\n")
        streams.close()
    assert (await pod.exited("once")).exit_code == 0
    assert pod.logged("once") == b"x" * 100_000 + b"\n"
    await until(lambda: pod.logged("always") == b"x" * 100_000 + b"\n")
    assert [c.id for c in (await pod.client.state()).containers if c.running] == ["always"]


async def test_input_is_not_lost_while_the_container_does_not_read(pod: TestPod) -> None:
    await pod.run("a", "sleep 0.5; /bin/cat | md5sum", stdin=True, stdin_once=True)
    streams = await pod.client.attach("a", stdin=True, stdout=True)
    assert streams.stdin_fd is not None and streams.stdout_fd is not None
    content = os.urandom(1_000_000)
    os.set_blocking(streams.stdin_fd, True)
    await asyncio.to_thread(_write_all, streams.stdin_fd, content)
    os.close(streams.stdin_fd)
    streams.stdin_fd = None
    digest = __import__("hashlib").md5(content).hexdigest()
    assert (await read_all(streams.stdout_fd)).split()[0].decode() == digest
    streams.close()


async def test_a_container_that_closes_its_stdin_closes_the_clients_input(pod: TestPod) -> None:
    await pod.run("a", "exec <&-; echo closed; sleep 100", stdin=True)
    await until(lambda: pod.logged("a") == b"closed\n")
    streams = await pod.client.attach("a", stdin=True)
    assert streams.stdin_fd is not None
    with pytest.raises(BrokenPipeError):
        for _ in range(3000):
            os.write(streams.stdin_fd, b"x")
            await asyncio.sleep(0.01)
    streams.close()


async def test_attaching_to_a_container_without_stdin_gets_a_closed_pipe(pod: TestPod) -> None:
    await pod.run("a", "sleep 100")
    streams = await pod.client.attach("a", stdin=True, stdout=True)
    assert streams.stdin_fd is not None
    with pytest.raises(BrokenPipeError):
        os.write(streams.stdin_fd, b"x")
    streams.close()


async def test_attaching_to_an_ended_container_is_an_error(pod: TestPod) -> None:
    await pod.run("a", "exit 0")
    await pod.exited("a")
    with pytest.raises(WrongState):
        await pod.client.attach("a")


# -- terminals


@pytest.mark.requirement("11.3")
async def test_a_containers_terminal_is_attached_logged_and_resized(pod: TestPod) -> None:
    await pod.run("a", "tty; read x; stty size; echo error >&2; echo got $x", tty=True, stdin=True)
    first = await pod.client.attach("a", stdin=True, stdout=True, stderr=True)
    second = await pod.client.attach("a", stdout=True)
    assert first.stdin_fd is not None and first.stdout_fd is not None and first.stderr_fd is None
    await pod.client.resize(123, 45, container="a")
    os.write(first.stdin_fd, b"hello\n")
    output = await read_all(first.stdout_fd)
    assert b"45 123\r\nerror\r\ngot hello\r\n" in output
    assert second.stdout_fd is not None and b"got hello" in await read_all(second.stdout_fd)
    assert (await pod.exited("a")).exit_code == 0
    logged = pod.logged("a")
    assert b"/dev/pts/" in logged and logged.endswith(b"got hello\r\n")
    assert pod.logged("a", "stderr") == b""
    first.close()
    second.close()


async def test_a_terminal_client_that_disconnects_does_not_end_the_container(pod: TestPod) -> None:
    await pod.run("a", "while read x; do echo got $x; done", tty=True, stdin=True, stdin_once=True)
    for n in range(3):
        streams = await pod.client.attach("a", stdin=True, stdout=True)
        assert streams.stdin_fd is not None
        os.write(streams.stdin_fd, b"%d\n" % n)
        await until(lambda n=n: b"got %d" % n in pod.logged("a"))
        streams.close()
    assert pod.exit_events("a") == []


async def test_a_container_without_a_terminal_cannot_be_resized(pod: TestPod) -> None:
    await pod.run("a", "sleep 100")
    with pytest.raises(WrongState):
        await pod.client.resize(80, 24, container="a")
    with pytest.raises(NotFound):
        await pod.client.resize(80, 24, exec_id="nothing")


async def test_a_thousand_resizes_are_accepted(pod: TestPod) -> None:
    await pod.run("a", "sleep 100", tty=True)
    await asyncio.gather(*(pod.client.resize(n % 300, n % 100, container="a") for n in range(1000)))


# -- exec


async def test_an_exec_has_the_requested_streams(pod: TestPod) -> None:
    await pod.run("a", "sleep 100")
    session = await _exec(pod, "a", "cat; echo error >&2; exit 5", stdin=True)
    assert (
        session.stdin_fd is not None
        and session.stdout_fd is not None
        and session.stderr_fd is not None
    )
    os.write(session.stdin_fd, b"input")
    os.close(session.stdin_fd)
    session.stdin_fd = None
    assert (await read_all(session.stdout_fd), await read_all(session.stderr_fd)) == (
        b"input",
        b"error\n",
    )
    assert await session.exited == 5
    session.close()
    silent = await _exec(pod, "a", "echo discarded; exit 6", stdout=False, stderr=False)
    assert (silent.stdin_fd, silent.stdout_fd, silent.stderr_fd) == (None, None, None)
    assert await silent.exited == 6
    assert pod.logged("a") == b""


async def test_an_exec_can_have_a_terminal(pod: TestPod) -> None:
    await pod.run("a", "sleep 100")
    session = await _exec(pod, "a", "read x; stty size; echo got $x >&2", tty=True, stdin=True)
    assert (
        session.stdin_fd is not None and session.stdout_fd is not None and session.stderr_fd is None
    )
    await pod.client.resize(99, 33, exec_id=session.exec_id)
    os.write(session.stdin_fd, b"hello\n")
    assert b"33 99\r\ngot hello\r\n" in await read_all(session.stdout_fd)
    assert await session.exited == 0
    session.close()


async def test_a_session_ends_when_its_terminal_is_closed(pod: TestPod) -> None:
    await pod.run("a", "sleep 100")
    session = await _exec(pod, "a", "sleep 100", tty=True, stdin=True)
    session.close()
    await pod.client.kill_exec(session.exec_id)
    assert await session.exited in (129, 137)


async def test_invalid_execs_are_errors(pod: TestPod) -> None:
    with pytest.raises(NotFound):
        await _exec(pod, "a", "true")
    await pod.run("a", "sleep 100")
    with pytest.raises(NotFound, match="no such file"):
        await pod.exec("a", "e", {"args": ["/no/such"]})
    await pod.client.kill_exec("never started")
    await pod.client.stop("a", 15, 0)
    with pytest.raises(WrongState):
        await _exec(pod, "a", "true")
    assert (await pod.client.state()).execs == []


async def test_killing_a_session_kills_only_its_descendants(pod: TestPod, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    await pod.run("a", "exec sleep 1000")
    await until(lambda: len(pod.processes()) == 1)
    before = set(pod.processes())
    other = await _exec(pod, "a", "exec sleep 1002")
    family = (
        f"echo $$ >> {pids}; sh -c 'echo $$ >> {pids}; exec sleep 100' & "
        f"( sh -c 'echo $$ >> {pids}; exec sleep 100' & ) ; "
        f"setsid sh -c 'echo $$ >> {pids}; sleep 100' & wait"
    )
    session = await _exec(pod, "a", family)
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
    await pod.client.kill_exec(session.exec_id)
    assert await session.exited == 137
    await until(lambda: all(gone(int(pid)) for pid in pids.read_text().split()))
    await until(
        lambda: set(pod.processes()) == before | {other.pid}
    )  # the pid of one is not reported
    session.close()
    other.close()


async def test_the_descendants_of_an_ended_session_can_still_be_killed(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    session = await _exec(pod, "a", "sleep 100 & echo $!")
    assert session.stdout_fd is not None
    left = int(await read_some(session.stdout_fd))
    assert await session.exited == 0 and not gone(left)
    await pod.client.kill_exec(session.exec_id)
    await until(lambda: gone(left))
    session.close()


async def test_a_fork_bomb_in_a_session_is_killed(pod: TestPod) -> None:
    """After the kill no process of the session is left in the container."""
    await pod.run("a", "exec sleep 1000")
    # Forks without end, in 40 processes at once.
    bomb = "f() { i=0; while [ $i -lt 40 ]; do (sleep 0.02; :) & i=$((i+1)); done; wait; f; }; f"
    session = await _exec(pod, "a", bomb)
    await until(lambda: len(pod.processes()) > 20)
    await pod.client.kill_exec(session.exec_id)
    assert await session.exited == 137
    await until(lambda: len(pod.processes()) == 1)
    session.close()


@pytest.mark.requirement("4.3.5")
async def test_sessions_end_with_their_container(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    session = await _exec(pod, "a", "sleep 1000")
    await pod.client.stop("a", 15, 0)
    assert await session.exited == 137
    session.close()


async def test_sessions_of_a_killed_server_are_killed_and_the_container_is_not(
    pod: TestPod,
) -> None:
    await pod.run("a", "exec sleep 1000")
    dying = await ShimClient.connect(pod.sandbox)
    process = {"args": ["/bin/sh", "-c", "sleep 100 & sleep 100"]}
    session = await dying.exec(StartExec("a", "e1", process, stdout=True, stderr=True))
    await until(lambda: len(pod.processes()) >= 3)
    dying.close()
    with pytest.raises(PeerError):
        await session.exited
    await until(lambda: len(pod.processes()) == 1)
    assert (await pod.client.state()).containers[0].running
    session.close()


async def test_a_session_that_leaves_a_daemon_ends_with_its_process(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    session = await _exec(pod, "a", "setsid sleep 100 & exit 4")
    assert await asyncio.wait_for(session.exited, 30) == 4  # the daemon sleeps longer
    session.close()


async def test_a_waiting_exec_blocks_no_other_call_and_can_be_killed(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    for name in ("late", "never"):
        os.mkfifo(pod.folder / name)
    late, never = (
        asyncio.create_task(
            pod.exec("a", name, {"args": ["/bin/echo", name], "gate": str(pod.folder / name)})
        )
        for name in ("late", "never")
    )
    await until(lambda: [name_of(child) for child in children(pod.pid)].count("cat") == 2)
    await _run_sessions(pod, 5)
    await pod.client.kill_exec("never")
    with pytest.raises(Error, match="killed"):
        await never
    assert not late.done()
    await open_gate(pod.folder / "late")
    session = await late
    assert session.stdout_fd is not None and await read_all(session.stdout_fd) == b"late\n"
    assert await session.exited == 0
    session.close()


async def test_large_requests_are_accepted(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    text = "x" * 100_000
    args = ["/bin/sh", "-c", 'printf "%s" "$0$1"', text, text]
    session = await pod.exec("a", "big", {"args": args})
    assert session.stdout_fd is not None
    assert await read_all(session.stdout_fd) == (text * 2).encode()
    session.close()


async def test_five_hundred_sessions_leave_nothing(pod: TestPod) -> None:
    await pod.run("a", "exec sleep 1000")
    await _run_sessions(pod, 20)
    before = await settled(pod, running=1)
    await _run_sessions(pod, 500)
    await until(lambda: descriptors(pod.pid) <= before)
    await until(lambda: len(pod.processes()) == len(children(pod.pid)) == 1)
    assert pod.shim_log() == ""


async def _run_sessions(pod: TestPod, count: int) -> None:
    for n in range(count):
        session = await pod.exec("a", f"{count}-{n}", {"args": ["/bin/true"]}, stdin=n % 2 == 0)
        assert await session.exited == 0
        session.close()


async def _exec(pod: TestPod, container: str, script: str, **streams: bool) -> ExecSession:
    number = time.monotonic_ns()
    return await pod.exec(container, f"e{number}", {"args": ["/bin/sh", "-c", script]}, **streams)


def _unread(pid: int) -> int:
    """Returns the number of unread bytes in the pipe of a process's standard output."""
    with open(f"/proc/{pid}/fd/1", "rb", buffering=0) as pipe:
        answer = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def _processor_s(pid: int) -> float:
    """Returns the processor time of a process in seconds, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


async def test_an_exit_is_reported_while_the_shim_cannot_write_a_file(pod: TestPod) -> None:
    """An exit is reported although neither exit.json nor the shim's log can be written, as when the
    state directory is full."""
    resource = __import__("resource")
    started = await pod.run("a", "exec sleep 1000")
    stopping = asyncio.ensure_future(pod.client.stop("a", signal.SIGWINCH, 60))
    await pod.client.state()
    resource.prlimit(pod.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    os.kill(started.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await stopping
    assert (await pod.exited("a")).signal
