"""A lowered plan is launched and followed until its process has become the program, or until it failed and nothing is left.

What is the same for a container, an exec and a pod's holder: the launcher is spawned, the process reports its pid, waits at
the points where its parent has steps, and ends its side of the socket by execve.
"""

from __future__ import annotations

import os
import time
from _signal import pidfd_send_signal  # type: ignore[import-not-found]  # (signal brings enum)
from errno import EACCES, EISDIR, ELIBACC, ENOENT, ENOTDIR

from pyrunc import debug
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound, PeerError
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import stat
from pyrunc.program.errors import OperationFailed
from pyrunc.program.launch import launch
from pyrunc.program.model import DESCRIPTOR, LISTENER, PID, PROGRESS, READY, STATUS, TIME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import TypeVar

    from pyrunc.launch.steps import StepContext
    from pyrunc.plan.lower import Lowered
    from pyrunc.plan.model import Step
    from pyrunc.program.launch import Message, Running
    from pyrunc.undo import Undo

    Result = TypeVar("Result")
    Times = list[tuple[str, int]] | None

SIGKILL = 9
BIRTH_TIMEOUT_S = 1.0
HOOK_WORDS_BYTES = 4096


class EndedEarly(Error):
    """The process is gone, and nothing was said."""


class Born:
    """A process of ours, from the moment it exists. The descriptors belong to whoever gets it."""

    __slots__ = ("console_fd", "listener_fd", "pid", "pidfd", "start_time")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)  # our own unreaped child: the number cannot have been reused
        facts = stat(pid)
        assert facts is not None  # it is there, if only as a zombie, until we reap it
        self.start_time = facts.start_time
        self.console_fd: int | None = None
        self.listener_fd: int | None = None

    def kill(self) -> None:
        """End it, wait for it, close what it gave us."""
        try:
            pidfd_send_signal(self.pidfd, SIGKILL)
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        except (ProcessLookupError, ChildProcessError):
            pass
        for descriptor in (self.pidfd, self.console_fd, self.listener_fd):
            if descriptor is not None:
                os.close(descriptor)


def _require_child(pid: int) -> None:
    """Raises Error unless the process is an unreaped child of ours."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, OverflowError, OSError):
        raise Error(f"the launcher reported process {pid}, which is no child of ours") from None


def bear(
    lowered: Lowered,
    descriptors: Mapping[str, int],
    undo: Undo,
    *,
    stdio: Sequence[int],
    args: Sequence[str],
    context: StepContext | None = None,
    extra: Mapping[int, int] | None = None,
    times: Times = None,
) -> Born:
    """Run the program; returns when its process has executed `args` (or waits for `start`). See `bearing`."""
    return to_the_end(
        bearing(lowered, descriptors, undo, stdio=stdio, args=args, context=context, extra=extra, times=times)
    )


def to_the_end(steps: Generator[int, None, Result]) -> Result:
    """What a generator of steps returns, for callers that have nothing else to do while a step waits."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def bearing(
    lowered: Lowered,
    descriptors: Mapping[str, int],
    undo: Undo,
    *,
    stdio: Sequence[int],
    args: Sequence[str],
    context: StepContext | None = None,
    extra: Mapping[int, int] | None = None,
    times: Times = None,
) -> Generator[int, None, Born]:
    """Run the program in steps: each yields a descriptor, and once that is readable the next step does not wait.

    `times` gets (number of the plan's line or step, nanoseconds) of a timed program. `context` is what the plan's steps of the
    parent work on; `extra` are further descriptors {number there: number here}.
    The process's end is pushed on `undo`. Raises KernelError worded with the plan line, NotFound and InvalidArgument in the
    words of execvp when there is no such program, and what a step raises.
    """
    fds = {number: descriptors[name] for name, number in lowered.numbers.items()}
    if extra:
        fds.update(extra)
    running = launch(lowered.program, stdio=stdio, fds=fds)
    born: Born | None = None
    ready = False
    early: list[Message] = []  # the launcher reports the pid, and the new process may be faster than it
    try:
        while True:
            if not running.queued:
                yield running.fileno()
            message = running.receive()
            if message is None:
                break
            if message.tag != DESCRIPTOR:
                close_all(message.fds)  # nobody asked for them
            if message.tag == PID and born is not None:
                raise Error("the launcher reported two processes")
            if message.tag == PID:
                _require_child(message.value)  # whatever was said: nobody else is ever killed
                born = Born(message.value)
                undo.push(f"process {born.pid}", born.kill)
                debug.say("process %d exists", born.pid)
                while early:
                    _answer(early.pop(0), born, running, lowered.steps, context, times)
            elif message.tag == READY:
                ready = True
                debug.say("it is ready to run %s", args[0])
            elif message.tag == TIME and times is not None:
                number = lowered.program.lines[message.op_index].number
                times.append((str(number), message.value * 1_000_000_000 + message.extra))
            elif born is None:
                early.append(message)
            else:
                _answer(message, born, running, lowered.steps, context, times)
    except OperationFailed as error:
        raise worded(error, args) from None
    except HookFailed as error:
        raise error.saying(os.pread(descriptors["hook-stderr"], HOOK_WORDS_BYTES, 0)) from None
    except GeneratorExit:  # the caller gives up: the process must be known, or nobody could end it
        if born is None:
            _hear_of_birth(running, undo)
        raise
    finally:
        running.close()
        for message in early:
            close_all(message.fds)
    if born is None or not ready:
        raise EndedEarly("the container's process ended before it could run anything")
    return born


def _hear_of_birth(running: Running, undo: Undo) -> None:
    """The launcher has cloned the process, or is about to, and tells its pid."""
    try:
        while (message := running.receive(BIRTH_TIMEOUT_S)) is not None:
            close_all(message.fds)
            if message.tag == PID:
                _require_child(message.value)
                born = Born(message.value)
                undo.push(f"process {born.pid}", born.kill)
                return
    except Error:  # it failed before, or never will
        pass


def _answer(
    message: Message,
    born: Born,
    running: Running,
    steps: Mapping[int, Sequence[Step]],
    context: StepContext | None,
    times: Times,
) -> None:
    """What the process reports on its way, other than that it exists and is ready."""
    if message.tag == DESCRIPTOR:
        if len(message.fds) != 1 or born.console_fd is not None:
            close_all(message.fds)
            raise Error(
                f"the container's process sent {len(message.fds)} descriptors where one terminal was due"
            )
        (born.console_fd,) = message.fds
        debug.say("received the terminal's master")
    elif message.tag == STATUS:
        raise HookFailed(message.value, message.extra)
    elif message.tag == PROGRESS:
        if message.value not in steps:
            raise Error("the container's process is at a point that it was not asked to report")
        debug.say("process %d waits at plan line %d", born.pid, message.value)
        _carry_out(message.value, steps[message.value], born, context, times)
        running.release()
    elif message.tag == LISTENER:
        from pyrunc.kernel.process import open_from_process

        born.listener_fd = open_from_process(born.pidfd, message.value)
        debug.say("fetched the seccomp listener")
        _carry_out(message.extra, steps.get(message.extra, ()), born, context, times)
        if times is not None:
            times.append((str(message.extra), time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)))
        running.release()


def _carry_out(
    line: int, steps: Sequence[Step], born: Born, context: StepContext | None, times: Times
) -> None:
    """The parent's steps at a line of the plan, in order."""
    if not steps:
        return
    from pyrunc.launch.steps import perform  # an exec that runs a kept program has none

    assert context is not None
    for k, step in enumerate(steps, 1):
        try:
            perform(step, born, context)
        except Error as error:
            error.add_detail(f"plan line {line}.{k}")
            raise
        if times is not None:
            times.append((f"{line}.{k}", time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)))


class HookFailed(PeerError):
    """What a startContainer hook's end means; -1 = it was killed because its time was up."""

    def __init__(self, index: int, wait_status: int, words: bytes = b"") -> None:
        self.index, self.wait_status = index, wait_status
        if wait_status == -1:
            how = "it did not end in time and was killed"
        else:
            code = os.waitstatus_to_exitcode(wait_status)
            how = f"exit status {code}" if code >= 0 else f"killed by signal {-code}"
        said = words.decode("utf-8", "replace").strip()
        super().__init__(
            f"error running startContainer hook #{index}: {how}" + (f", stderr: {said}" if said else "")
        )

    def saying(self, words: bytes) -> HookFailed:
        """The same with what the hook wrote to its stderr."""
        return HookFailed(self.index, self.wait_status, words)


def worded(error: OperationFailed, args: Sequence[str]) -> Error:
    """What callers of a runtime match: the texts of exec.LookPath and of execve(2)."""
    from pyrunc.plan.lower_process import NO_PROGRAM

    if error.mark != NO_PROGRAM:
        return error
    name = args[0]
    if error.errno in (ENOENT, ENOTDIR):
        if "/" not in name:
            return NotFound(f'exec: "{name}": executable file not found in $PATH')
        return NotFound(f'exec: "{name}": stat {name}: {os.strerror(error.errno).lower()}')
    if error.errno == ELIBACC:  # `program.macros.execute`
        return NotFound(
            f"exec {name}: {os.strerror(ENOENT).lower()} (the file is there, its interpreter or loader is not)"
        )
    if error.errno in (EACCES, EISDIR):
        return InvalidArgument(f'exec: "{name}": {os.strerror(error.errno).lower()}')
    return KernelError("exec", f'"{name}"', error.errno, os.strerror(error.errno).lower())
