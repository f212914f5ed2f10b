"""Tests what `launch` guarantees for descriptors, signals, the executable and the end of a
program."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from pyrunc.abi.file import F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_WRITE
from pyrunc.errors import DeadlineExceeded, Error, KernelError
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.errors import OperationFailed
from pyrunc.program.launch import LAUNCHER, executable, launch
from pyrunc.program.model import DESCRIPTOR, PID, PROGRESS, READY, Line, Program


def shell(script: str, *, close_from: int | None = None) -> Program:
    """Return a program that executes `sh -c script`."""
    a = Assembler()
    macros.prologue(a)
    a.send(READY)
    if close_from is not None:
        macros.close_all_from(a, close_from, cloexec=True)
    result = a.slot(4)
    a.at(Line("execute '/bin/sh'", 3))
    macros.execute(
        a,
        ["/bin/sh"],
        a.pointers(["sh", "-c", script]),
        a.pointers(["PATH=/bin:/usr/bin"]),
        result=result,
    )
    a.fail(result)
    return a.program()


def waiting() -> Program:
    """Return a program that reports ready and waits."""
    a = Assembler()
    macros.prologue(a, "pyrunc:test")
    a.send(READY)
    a.wait()
    a.exit(0)
    return a.program()


def output(program: Program, fds: Mapping[int, int] | None = None) -> str:
    """Run a program whose payload replaces the launcher itself, and return its standard output."""
    read, write = os.pipe()
    try:
        with launch(program, stdio=(0, write, 2), fds=fds) as running:
            os.close(write)
            write = -1
            running.expect(READY)
            assert running.receive() is None
            with open(read, closefd=False) as file:
                text = file.read()
            assert running.reap_launcher() == 0
            return text
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)


@contextmanager
def files(count: int) -> Iterator[list[int]]:
    """Open files whose contents are `0`, `1`, …"""
    descriptors = []
    for number in range(count):
        read, write = os.pipe()
        os.write(write, str(number).encode())
        os.close(write)
        descriptors.append(read)
    try:
        yield descriptors
    finally:
        for fd in descriptors:
            os.close(fd)


def test_messages_go_both_ways() -> None:
    with launch(waiting()) as running:
        assert running.expect(READY).op_index > 0
        assert os.readlink(f"/proc/{running.launcher_pid}/exe").startswith("/memfd:pyrunc:launcher")
        with open(f"/proc/{running.launcher_pid}/comm") as file:
            assert file.read() == "pyrunc:test\n"
        running.release()
        assert running.receive() is None
        assert running.reap_launcher() == 0


def test_the_end_of_messages_is_execve_not_the_payload_s_end() -> None:
    read, write = os.pipe()
    try:
        with launch(shell("read end <&3"), fds={3: read}) as running:
            running.expect(READY)
            assert running.receive() is None
            still_there = os.waitid(
                os.P_PID, running.launcher_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            assert still_there is None
            os.write(write, b"\n")
            assert running.reap_launcher() == 0
    finally:
        os.close(read)
        os.close(write)


def test_descriptors_arrive_under_their_numbers() -> None:
    with files(3) as (zero, one, two):
        text = output(shell("cat <&3; cat <&4; cat <&9"), {3: zero, 4: one, 9: two})
    assert text == "012"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_sources_may_be_the_targets_of_others(order: Sequence[int]) -> None:
    with files(3) as sources:
        targets = [sources[i] for i in order]
        numbers = dict(zip(targets, sources, strict=True))
        script = "; ".join(f"cat /proc/self/fd/{source}" for source in sources)
        text = output(shell(script), numbers)
    assert text == "".join(str(order.index(i)) for i in range(3))


def test_the_same_source_can_go_to_several_targets() -> None:
    read, write = os.pipe()
    try:
        with launch(shell("echo a >&5; echo b >&6"), fds={5: write, 6: write}) as running:
            running.expect(READY)
            assert running.receive() is None
        assert os.read(read, 100) == b"a\nb\n"
    finally:
        os.close(read)
        os.close(write)


def test_the_payload_has_its_descriptors_and_no_others() -> None:
    with files(1) as (one,):
        text = output(shell("exec ls /proc/self/fd", close_from=8), {7: one})
    # 3 is ls's own
    assert text.split() == ["0", "1", "2", "3", "7"]


def test_nothing_is_blocked_or_ignored_in_the_payload() -> None:
    before = (
        signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2, 40])
    try:
        text = output(shell("exec grep -E 'Sig(Ign|Blk)' /proc/self/status"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGPIPE, before[1])
    assert text.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]


def test_the_executable_is_sealed_and_cannot_be_written() -> None:
    digest = hashlib.sha256(open(LAUNCHER, "rb").read()).digest()
    seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
    assert fcntl.fcntl(executable(), fcntl.F_GET_SEALS) & seals == seals
    with launch(waiting()) as running:
        running.expect(READY)
        exe = f"/proc/{running.launcher_pid}/exe"
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND):
            with pytest.raises(OSError) as caught:
                os.close(os.open(exe, flags))
            assert caught.value.errno in (errno.ETXTBSY, errno.EPERM, errno.EACCES)
        with pytest.raises(OSError):
            os.truncate(exe, 0)
        assert hashlib.sha256(open(exe, "rb").read()).digest() == digest
    # Also when nothing runs it any more.
    for flags in (os.O_WRONLY, os.O_RDWR):
        try:
            fd = os.open(f"/proc/self/fd/{executable()}", flags)
        except OSError:
            continue
        try:
            with pytest.raises(OSError) as caught:
                os.write(fd, b"evil")
            assert caught.value.errno == errno.EPERM
            with pytest.raises(OSError):
                os.ftruncate(fd, 0)
            with pytest.raises(OSError):
                fcntl.fcntl(fd, 1033, 0)
        finally:
            os.close(fd)
    assert hashlib.sha256(open(LAUNCHER, "rb").read()).digest() == digest


def test_the_executable_is_made_once() -> None:
    assert executable() == executable()


def test_an_executable_whose_descriptor_number_was_reused_is_opened_again() -> None:
    number = executable()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, number)  # what a fork that closes everything and opens something else comes to
    os.close(null)
    assert executable() != number
    os.close(number)
    with launch(waiting()) as running:
        running.expect(READY)


def test_the_launcher_is_not_dumpable() -> None:
    a = Assembler()
    macros.prologue(a)
    a.sys("setresuid", 12345, 12345, 12345)
    macros.forbid_dumps(a)
    a.send(READY)
    a.wait()
    a.exit(0)
    with launch(a.program()) as running:
        running.expect(READY)
        # The files of a process that others may trace belong to its user.
        assert os.stat(f"/proc/{running.launcher_pid}/fd").st_uid == 0
        tracer = "import os,sys; os.setuid(12345); os.listdir(f'/proc/{sys.argv[1]}/fd')"
        result = subprocess.run(
            [sys.executable, "-S", "-c", tracer, str(running.launcher_pid)],
            capture_output=True,
            text=True,
        )
        assert "PermissionError" in result.stderr
    with launch(shell("sleep 1000")) as running:
        running.expect(READY)
        assert running.receive() is None
        assert os.stat(f"/proc/{running.launcher_pid}/fd").st_mode & 0o500
        os.kill(running.launcher_pid, signal.SIGKILL)


def test_a_failure_names_the_plan_line() -> None:
    a = Assembler()
    macros.prologue(a)
    a.at(Line("mount 'proc' on '/nonexistent'", 17))
    a.sys("mount", "proc", "/nonexistent", "proc", 0, 0)
    with launch(a.program()) as running:
        with pytest.raises(OperationFailed) as caught:
            running.receive()
        assert str(caught.value) == "mount 'proc' on '/nonexistent': ENOENT (plan line 17)"
        assert (caught.value.errno, caught.value.line) == (errno.ENOENT, 17)
        assert caught.value.to_fields()["kind"] == "kernel"
        assert running.receive() is None


def test_a_missing_program_is_reported_by_the_check() -> None:
    a = Assembler()
    result = a.slot(4)
    a.at(Line("execute 'nothing'", 9))
    macros.execute(
        a,
        ["/bin/nothing", "/usr/bin/nothing"],
        a.pointers(["nothing"]),
        a.pointers([]),
        result=result,
    )
    a.fail(result)
    with (
        launch(a.program()) as running,
        pytest.raises(OperationFailed, match="execute 'nothing': ENOENT"),
    ):
        running.receive()


def test_an_unread_release_is_not_an_error() -> None:
    a = Assembler()
    a.send(READY)
    a.sys("nanosleep", a.data((50_000_000 << 64).to_bytes(16, "little")), 0)
    a.exit(0)
    with launch(a.program()) as running:
        running.expect(READY)
        running.release()
        assert running.receive() is None
        running.release()
        assert running.receive() is None


def test_expect_reports_the_other_message() -> None:
    with (
        launch(waiting()) as running,
        pytest.raises(Error, match="received message 2 instead of 1"),
    ):
        running.expect(PID)
    a = Assembler()
    a.exit(3)
    with (
        launch(a.program()) as running,
        pytest.raises(Error, match="ended before it sent message 2"),
    ):
        running.expect(READY)


def test_receive_fails_after_its_deadline() -> None:
    with launch(waiting()) as running:
        running.expect(READY)
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            running.receive(0.15)
        assert 0.1 < time.monotonic() - start < 10
        running.release()
        assert running.receive(30) is None


def test_a_killed_launcher_is_reported() -> None:
    with launch(waiting()) as running:
        running.expect(READY)
        os.kill(running.launcher_pid, signal.SIGKILL)
        running.reap_launcher()
        with pytest.raises(Error, match="signal 9"):
            running.receive()


def test_closing_the_socket_ends_a_program_that_waits() -> None:
    running = launch(waiting())
    running.expect(READY)
    running.close()
    assert os.waitstatus_to_exitcode(running.reap_launcher()) == 124
    assert running.fileno() == -1 and running.receive() is None


def test_a_refused_program_is_reported() -> None:
    raw = bytearray(waiting().encoded)
    raw[0] ^= 1
    with (
        launch(Program(bytes(raw))) as running,
        pytest.raises(Error, match="not a program"),
    ):
        running.receive()


def test_a_cloned_child_is_ours_and_the_launcher_s_exit_does_not_matter() -> None:
    a = Assembler()
    macros.prologue(a)
    macros.fork_parent(a, 0)
    a.wait()
    a.exit(42)
    with launch(a.program()) as running:
        pid = running.expect(PID).value
        assert running.reap_launcher() == 0
        running.release()
        assert running.receive() is None
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42


def test_the_pid_comes_before_messages_of_that_process() -> None:
    a = Assembler()
    macros.prologue(a)
    macros.fork_parent(a, 0)
    macros.send_fd(a, 1)
    a.at(Line("open '/nonexistent'"))
    a.sys("openat", -100, "/nonexistent", 0, 0)
    program = a.program()
    for _ in range(150):
        with launch(program) as running:
            pid = running.expect(PID).value
            (fd,) = running.expect(DESCRIPTOR).fds
            os.close(fd)
            with pytest.raises(OperationFailed, match="ENOENT"):
                running.receive()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 125
            assert running.receive() is None


def test_a_failure_before_the_clone_does_not_wait_for_a_pid() -> None:
    a = Assembler()
    a.sys("close", -1)
    macros.fork_parent(a, 0)
    a.exit(0)
    with launch(a.program()) as running, pytest.raises(OperationFailed, match="EBADF"):
        running.receive()


def test_messages_of_a_child_arrive_after_the_launcher_was_killed() -> None:
    a = Assembler()
    child, pid = a.label(), a.slot(4)
    macros.clone_sibling(a, 0, pid)
    a.compare(pid, "eq", 0, true=child)
    a.sys("getpid", store=pid)
    a.sys("kill", pid, signal.SIGKILL)
    a.send(PID, pid)
    a.exit(0)
    a.place(child)
    a.send(PROGRESS, 5)
    a.exit(0)
    with launch(a.program()) as running:
        assert running.expect(PROGRESS).value == 5
    os.waitpid(-1, 0)


def test_unclaimed_descriptors_are_closed() -> None:
    a = Assembler()
    child, pid = a.label(), a.slot(4)
    macros.clone_sibling(a, 0, pid)
    a.compare(pid, "eq", 0, true=child)
    a.wait()
    a.send(PID, pid)
    a.exit(0)
    a.place(child)
    macros.send_fd(a, 1)
    a.exit(0)
    before = os.listdir("/proc/self/fd")
    with launch(a.program()) as running, pytest.raises(DeadlineExceeded):
        running.receive(0.2)
    assert os.listdir("/proc/self/fd") == before
    os.waitpid(-1, 0)


def test_a_descriptor_that_is_not_open_is_an_error_here() -> None:
    with pytest.raises(KernelError, match="EBADF"):
        launch(waiting(), fds={3: 987})


def test_many_threads_launch_at_once() -> None:
    results: list[str] = []

    def one(number: int) -> None:
        a = Assembler()
        macros.prologue(a)
        a.send(PROGRESS, number)
        a.wait()
        a.exit(number)
        with launch(a.program(), fds={3: 0, 8: 1}) as running:
            value = running.expect(PROGRESS).value
            running.release()
            assert running.receive() is None
            results.append(f"{value} {os.waitstatus_to_exitcode(running.reap_launcher())}")

    threads = [threading.Thread(target=one, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{n} {n}" for n in range(40))


def test_the_program_is_a_memfd_that_the_payload_does_not_get() -> None:
    text = output(shell("exec ls -l /proc/self/fd"))
    assert "memfd" not in text and "socket" not in text


FALLBACK = """
import os, sys
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import executable, launch
from pyrunc.kernel.fd import open_sealed_executable
open("/proc/sys/vm/memfd_noexec", "w").write(sys.argv[1])
try:
    os.close(open_sealed_executable("x", b"x")); print("memfd")
except Exception as error:
    print(error.symbol)
a = Assembler(); a.exit(7)
running = launch(a.program())
assert running.receive() is None
print(os.waitstatus_to_exitcode(running.reap_launcher()))
try:
    os.write(os.open(f"/proc/self/fd/{executable()}", os.O_WRONLY), b"evil"); print("writable")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize(("value", "memfd"), [("0", "memfd"), ("1", "memfd"), ("2", "EACCES")])
def test_the_launcher_is_executed_from_its_file_where_memfds_cannot_be(
    value: str, memfd: str
) -> None:
    if not os.path.exists("/proc/sys/vm/memfd_noexec"):
        pytest.skip("no vm.memfd_noexec (Linux 6.3)")
    result = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", FALLBACK, value],
        capture_output=True,
        text=True,
        timeout=90,
    )
    lines = result.stdout.split()
    assert lines[:2] == [memfd, "7"], result.stdout + result.stderr
    # Sealed (EPERM), or the same file as on disk below a read-only mount (EROFS).
    assert lines[2] == str(errno.EROFS if value == "2" else errno.EPERM)


PAUSE = """
import os, time
from pyrunc.compile.pause import _open_pause
from pyrunc.program.launch import LAUNCHER
open("/proc/sys/vm/memfd_noexec", "w").write("2")
number = _open_pause("system_u:object_r:bin_t:s0")
child = os.fork()
if child == 0:
    os.execve(number, ["pause"], {})
while open(f"/proc/{child}/comm").read().strip() != "pause":
    time.sleep(0.01)
print(os.path.samefile(f"/proc/{child}/exe", os.path.dirname(LAUNCHER) + "/pause"))
os.kill(child, 15)
"""


def test_the_pause_program_is_executed_from_its_file_where_memfds_cannot_be() -> None:
    if not os.path.exists("/proc/sys/vm/memfd_noexec"):
        pytest.skip("no vm.memfd_noexec (Linux 6.3)")
    result = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", PAUSE],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.stdout == "True\n", result.stdout + result.stderr
