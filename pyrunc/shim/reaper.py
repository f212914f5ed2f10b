"""Waits for the ends of processes: the shim's children, orphans that it inherits as a subreaper,
and processes that were taken over from a killed shim."""

from __future__ import annotations

import os

from pyrunc.kernel.reaper import empty_notice, open_child_notice
from pyrunc.shim.keeper_link import KeeperLink
from pyrunc.shim.loop import READABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from pyrunc.shim.loop import EventLoop, Timer
    from pyrunc.shim.starter import SupervisedProcess

    OnExit = Callable[["ProcessEnd"], None]


# A pidfd is readable when the process is a zombie (pidfd_open(2)), but PIDFD_INFO_EXIT has its
# status only once the parent has reaped it.
RETRY_S, TRIES = 0.02, 50  # while another process has not reaped its child
SEARCH_S = 0.005  # delay before each expected process is checked for its end


class ProcessEnd:
    """The end of a process. `exit_code`: 128 + n when signal n ended it, None when it is
    unknown."""

    __slots__ = ("exit_code", "pid", "signal")

    def __init__(self, pid: int, status: int | None) -> None:
        """Convert the wait status `status` (wait(2)) of the process `pid`. None: the status is
        unknown."""
        self.pid = pid
        self.exit_code: int | None = None
        self.signal: int | None = None
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            self.exit_code = code if code >= 0 else 128 - code
            self.signal = None if code >= 0 else -code


class Reaper:
    """Reaps the shim's children and reports their ends.

    Between `hold` and `let_go`, while a process is being started, only pids that were passed to
    `expect` are reaped. The code that starts the process reaps its own helper processes itself. If
    the new process ends before `expect` is called with its pid, it stays a zombie until then.
    """

    def __init__(self, loop: EventLoop, keeper: KeeperLink | None = None) -> None:
        self._loop, self._keeper = loop, keeper or KeeperLink(loop, None)
        self._expected: dict[int, OnExit] = {}
        # pid -> start time of processes whose wait status the keeper gets before they are reaped
        self._noted: dict[int, int] = {}
        self._holds = 0
        self._search: Timer | None = None
        self._notice = open_child_notice()
        loop.watch(self._notice, READABLE, self._ready)
        self._reap()  # a child may have ended before there was a handler

    @property
    def busy(self) -> bool:
        """Return whether a process is being started, or a worker is running, for example to clean
        up."""
        return self._holds > 0

    def expect(self, pid: int, on_exit: OnExit, start_time: int = 0) -> None:
        """Call `on_exit` once when our child `pid` has ended, or now if it has ended already.

        With `start_time`, the keeper also gets the wait status. If this shim is killed before
        `on_exit` has written the status, the shim that takes over reads it from the keeper.
        """
        self._expected[pid] = on_exit
        if start_time:
            self._noted[pid] = start_time
        self._reap_one(pid)

    def expect_other(self, process: SupervisedProcess, on_exit: OnExit) -> None:
        """Call `on_exit` once when a process that is not our child has ended. Its pidfd must stay
        open until then."""
        assert process.pidfd is not None
        self._loop.watch(
            process.pidfd, READABLE, lambda events: self._other_ended(process, on_exit, TRIES)
        )

    def _other_ended(self, process: SupervisedProcess, on_exit: OnExit, tries: int) -> None:
        assert process.pidfd is not None
        self._loop.unwatch(process.pidfd)
        status = self._keeper.exit_status(process.pid, process.start_time, process.pidfd)
        if status is None and tries:
            self._loop.after(RETRY_S, lambda: self._other_ended(process, on_exit, tries - 1))
        else:
            on_exit(ProcessEnd(process.pid, status))

    def hold(self) -> None:
        """Reap only expected processes until `let_go`, because a process is being started. Calls
        nest: each `hold` needs a `let_go`."""
        self._holds += 1

    def let_go(self) -> None:
        """Undo one `hold`: the process was started, or its start has failed."""
        self._holds -= 1
        self._reap()

    def _ready(self, events: int) -> None:
        empty_notice(self._notice)
        self._reap()

    def _reap(self) -> None:
        if not self._holds:
            if self._search is not None:
                self._search.cancel()
                self._search = None
            while ended := self._wait(os.P_ALL, 0):
                self._notify(ended)
            return
        while (pid := _first_zombie()) in self._expected:
            self._reap_one(pid)
        # A zombie that the starting code waits for may hide others. Mostly that code reaps it at
        # once, so the search is put off: it costs a system call for each expected process.
        if pid and self._search is None:
            self._search = self._loop.after(SEARCH_S, self._reap_expected)

    def _reap_expected(self) -> None:
        self._search = None
        for pid in list(self._expected):
            self._reap_one(pid)

    def _reap_one(self, pid: int) -> None:
        ended = self._wait(os.P_PID, pid)
        if ended:
            self._notify(ended)

    def _notify(self, ended: ProcessEnd) -> None:
        on_exit = self._expected.pop(ended.pid, None)
        if on_exit is not None:
            on_exit(ended)

    def _wait(self, kind: int, pid: int) -> ProcessEnd | None:
        """Reap one ended child; None if no child has ended. Only children that waitid(2) selects by
        `kind` (P_ALL or P_PID) and `pid` are looked at."""
        try:
            result = os.waitid(
                kind, pid, os.WEXITED | os.WNOHANG | (os.WNOWAIT if self._noted else 0)
            )
        except ChildProcessError:
            return None
        if result is None:
            return None
        # waitid(2) has taken the status of wait(2) apart. The core-dump bit is lost.
        by_exit = result.si_code == os.CLD_EXITED
        status = result.si_status << 8 if by_exit else result.si_status
        if self._noted:
            if start_time := self._noted.pop(result.si_pid, 0):
                # Before the reaping: if the shim is killed in between, the zombie goes to the
                # keeper, which reads the status itself.
                self._keeper.note_exit(result.si_pid, start_time, status)
            os.waitpid(result.si_pid, 0)
        return ProcessEnd(result.si_pid, status)


def _first_zombie() -> int:
    """Return the pid of a child that has ended, without reaping it; 0 if there is none."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return result.si_pid if result else 0
