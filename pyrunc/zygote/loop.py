"""The zygote's loop: serves the server's socket, reaps children, and ends jobs at their deadlines.
It never waits for anything else."""

from __future__ import annotations

import os
import select
import sys
import time

from pyrunc import ipc
from pyrunc.errors import Error, InvalidArgument, KernelError
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.reaper import empty_notice, open_child_notice
from pyrunc.zygote import child, descendants, preload
from pyrunc.zygote.messages import UNANSWERED, Cancel, Fork, Forked, JobEnded, RunJob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

    from pyrunc.ipc import Message
    from pyrunc.records import Record

LONGEST_WAIT_MS = 86_400_000.0  # poll(2) counts in an int; a deadline may be years away


class _Job:
    """A running job. `deadline`: in monotonic seconds."""

    __slots__ = ("deadline", "pid", "request_id", "timed_out")

    def __init__(self, request_id: int, pid: int, deadline: float | None) -> None:
        self.request_id = request_id
        self.pid = pid
        self.deadline = deadline
        self.timed_out = False


class ZygoteLoop:
    """Serves one server until its socket closes."""

    def __init__(self, server: socket) -> None:
        self._server = server
        self._jobs: dict[int, _Job] = {}

    def serve(self) -> None:
        """Fork on request. Returns when the server has ended, after all jobs were killed."""
        wakeup = open_child_notice()
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        try:
            while True:
                ready = {fd for fd, _ in poll.poll(self._wait_ms())}
                if wakeup in ready:
                    empty_notice(wakeup)
                self._reap()
                self._expire()
                if self._server.fileno() in ready and not self._request():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the server went away in the middle of an answer, or without having read one
        finally:
            for job in self._jobs.values():
                descendants.kill(job.pid)

    def _request(self) -> bool:
        received = ipc.receive(self._server)
        if received is None:
            return False
        request, fds = received
        try:
            self._dispatch(request, fds)
        except Error as error:
            self._fail(request, error)
        except OSError as error:
            self._fail(request, KernelError("fork", str(request.get("function")), error.errno or 0))
        finally:
            close_all(fds)
        return True

    def _dispatch(self, request: Message, fds: list[int]) -> None:
        call = request.get("call")
        if call == Fork.call:
            fork = Fork.of(request)
            pid = child.fork_detached(preload.resolve(fork.function), fork.arguments, fds)
            self._answer(request["id"], Forked(pid))
        elif call == RunJob.call:
            self._run(request["id"], RunJob.of(request), fds)
        elif call == Cancel.call:
            self._cancel(Cancel.of(request))
        else:
            raise InvalidArgument(f"the zygote has no call {call!r}")

    def _run(self, request_id: int, request: RunJob, fds: list[int]) -> None:
        pid = child.fork_job(request, fds)
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        self._jobs[pid] = _Job(request_id, pid, deadline)

    def _cancel(self, request: Cancel) -> None:
        for job in self._jobs.values():
            if job.request_id == request.run:
                descendants.kill(job.pid)

    def _answer(self, request_id: int, answer: Record) -> None:
        ipc.send(self._server, {"id": request_id, "ok": answer.to_fields()})

    def _fail(self, request: Message, error: Error) -> None:
        print(f"pyrunc-zygote: {error}", file=sys.stderr)
        ipc.send(self._server, {"id": request.get("id", UNANSWERED), "error": error.to_fields()})

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            job = self._jobs.pop(ended.si_pid, None)
            if job:
                descendants.kill(job.pid)  # the zombie has its number until the next line
            os.waitpid(ended.si_pid, 0)
            if job:
                code = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
                self._answer(job.request_id, JobEnded(code, job.timed_out))

    def _expire(self) -> None:
        now = time.monotonic()
        for job in self._jobs.values():
            if job.deadline is not None and job.deadline <= now:
                job.timed_out, job.deadline = True, None
                descendants.kill(job.pid)

    def _wait_ms(self) -> float | None:
        deadlines = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        if not deadlines:
            return None
        return min(max(0.0, (min(deadlines) - time.monotonic()) * 1000 + 1), LONGEST_WAIT_MS)
