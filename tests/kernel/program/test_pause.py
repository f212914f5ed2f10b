"""Tests that `pause` keeps namespaces, reaps and exits, as process 1 of a pid namespace and as an
ordinary process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pyrunc.abi.arch import arch
from pyrunc.abi.clone import CLONE_NEWPID
from pyrunc.kernel import process
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import launch
from pyrunc.program.model import PID
from tests.kernel.program.harness import MACHINES, NATIVE, program_of
from tests.support.processes import wait_until

pytestmark = pytest.mark.parametrize("machine", MACHINES)


def eventually(what: Callable[[], bool]) -> bool:
    """Tell whether the condition became true in time."""
    return wait_until(what, 30, 0.01)


def waits(pid: int) -> bool:
    """Tell whether pause sleeps in rt_sigtimedwait."""
    # qemu-user makes that call for pause, too.
    with open(f"/proc/{pid}/syscall") as file:  # `running`, or the number of the call
        return file.read().split()[0] == str(arch().syscalls["rt_sigtimedwait"])


@contextmanager
def started_pause(machine: str) -> Iterator[tuple[int, int]]:
    """Return (pid, pidfd) of a pause process that is process 1 of a new pid namespace."""
    command = program_of("pause", machine)
    path = command[0] if command[0].startswith("/") else f"/usr/bin/{command[0]}"
    a = Assembler()
    macros.prologue(a)
    macros.fork_parent(a, CLONE_NEWPID)
    result = a.slot(4)
    macros.execute(a, [path], a.pointers(command), a.pointers([]), result=result)
    a.fail(result)
    with launch(a.program()) as running:
        pid = running.expect(PID).value
        assert running.receive() is None
    pidfd = os.pidfd_open(pid)
    try:
        assert eventually(lambda: waits(pid))
        yield pid, pidfd
    finally:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except (ProcessLookupError, ChildProcessError):
            pass  # the test has seen its end
        os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def ends_with(pidfd: int, code: int) -> None:
    assert eventually(lambda: has_ended(pidfd))
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_1_leaves_with_0(machine: str, number: int) -> None:
    with started_pause(machine) as (_, pidfd):
        signal.pidfd_send_signal(pidfd, number)
        ends_with(pidfd, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pause_as_an_ordinary_process_exits_with_0(machine: str, number: int) -> None:
    with subprocess.Popen(program_of("pause", machine)) as child:
        assert eventually(lambda: waits(child.pid))
        child.send_signal(number)
        assert child.wait(timeout=10) == 0


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGCHLD, signal.SIGCONT]
)
def test_other_signals_do_not_end_process_1(machine: str, number: int) -> None:
    if machine != NATIVE:
        return  # qemu-user carries out the default action itself, whatever the process's number
    with started_pause(machine) as (pid, pidfd):
        signal.pidfd_send_signal(pidfd, number)
        time.sleep(0.05)
        assert not has_ended(pidfd)
        assert eventually(lambda: bool((facts := process.stat(pid)) and facts.state == "S"))
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        ends_with(pidfd, 0)


def children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_orphans_are_reaped(machine: str) -> None:
    with started_pause(machine) as (pid, pidfd):
        a = Assembler()
        macros.prologue(a)
        a.sys("setns", 3, CLONE_NEWPID)
        macros.fork_parent(a, 0)
        result = a.slot(4)
        # Twenty orphans: those that end at once and those that end together, when the pipe does.
        script = "for i in 1 2 3 4 5 6 7 8 9 10; do (sleep 0 &) ; (cat <&4 &) ; done"
        macros.execute(
            a,
            ["/bin/sh"],
            a.pointers(["sh", "-c", script]),
            a.pointers(["PATH=/bin:/usr/bin"]),
            result=result,
        )
        a.fail(result)
        reading, writing = os.pipe()
        with launch(a.program(), fds={3: pidfd, 4: reading}) as running:
            shell = running.expect(PID).value
            assert running.receive() is None
        os.close(reading)
        os.waitpid(shell, 0)
        assert eventually(lambda: len(children(pid)) == 10)
        os.close(writing)
        assert eventually(lambda: not children(pid))
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        ends_with(pidfd, 0)


def test_the_pause_process_uses_next_to_no_memory_and_no_time(machine: str) -> None:
    if machine != NATIVE:
        return  # under qemu the numbers are qemu's
    with started_pause(machine) as (pid, _):
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        private_kb = int(fields["RssAnon"].split()[0])
        assert private_kb <= 64, fields["RssAnon"]
        if "PYRUNC_GUEST" in os.environ:
            return  # it took 21 ms on an emulated processor
        with open(f"/proc/{pid}/schedstat") as file:
            # nanoseconds on a processor, execve included
            assert int(file.read().split()[0]) < 20_000_000
