"""Carries out a launch: the new process runs the compiled program, and its parent carries out the
plan's parent steps. A launch that fails is undone.

A container, an exec and a pod's pause process are launched in the same way. The parent spawns the
launcher, which clones the new process and reports its pid. The new process waits at each line of
the plan for which its parent has steps. The launch ends when the process closes its end of the
socket: when it executes the user's command, or begins to wait for `pyrunc start`.
"""

from __future__ import annotations

import os
import time
from errno import (
    E2BIG,
    EACCES,
    EINVAL,
    EISDIR,
    ELIBACC,
    ELIBBAD,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    ENOEXEC,
    ENOTDIR,
)

from pyrunc import debug
from pyrunc.errors import (
    Error,
    InvalidArgument,
    KernelError,
    NotFound,
    PeerError,
    ResourceExhausted,
)
from pyrunc.kernel.fd import close_all
from pyrunc.kernel.process import kill_and_reap, stat
from pyrunc.launch.stdio import give_to, own_nulls
from pyrunc.program.errors import OperationFailed
from pyrunc.program.launch import launch as spawn
from pyrunc.program.model import DESCRIPTOR, LISTENER, PID, PROGRESS, READY, STATUS, TIME
from pyrunc.timings import CLONED, RUNS, SPAWNED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import TypeVar

    from pyrunc.launch.model import Launch
    from pyrunc.program.launch import LauncherMessage, RunningProgram
    from pyrunc.undo import Undo

    Result = TypeVar("Result")
    Recorder = Callable[["ChildProcess"], object]
    Times = list[tuple[str, int]]

# Errors of execve that are about the caller's program or its arguments.
NOT_EXECUTABLE = (E2BIG, EINVAL, ELIBBAD, ELOOP, ENAMETOOLONG, ENOEXEC)
PID_TIMEOUT_S = 1.0
HOOK_OUTPUT_LIMIT_BYTES = 4096
OOM_KILLED = "container init was OOM-killed (memory limit too low?)"


class EndedEarly(Error):
    """The process ended before it reported that it is ready."""


class ChildProcess:
    """A process that a launch has cloned. The object's owner closes the descriptors.

    - `console_fd`: the terminal's master. None until the process has sent it.
    - `listener_fd`: the seccomp listener. None until the process has sent it.
    """

    __slots__ = ("console_fd", "listener_fd", "pid", "pidfd", "start_time")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Our own unreaped child: the number cannot have been reused.
        self.pidfd = os.pidfd_open(pid)
        process = stat(pid)
        assert process is not None  # it exists, if only as a zombie, until we reap it
        self.start_time = process.start_time
        self.console_fd: int | None = None
        self.listener_fd: int | None = None

    def kill(self) -> None:
        """Kill the process, wait for its end, close its descriptors."""
        kill_and_reap(self.pidfd)
        for descriptor in (self.pidfd, self.console_fd, self.listener_fd):
            if descriptor is not None:
                os.close(descriptor)


def launch(request: Launch, undo: Undo) -> ChildProcess:
    """Run `launch_steps` to its end: start the process and wait until it has executed its command,
    or waits for `start`. Arguments and errors are those of `launch_steps`."""
    return drive(launch_steps(request, undo))


def drive(steps: Generator[int, None, Result]) -> Result:
    """Run a generator of steps to its end and return its result. Blocks while a step waits."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def launch_steps(
    request: Launch, undo: Undo, *, record: Recorder | None = None, times: Times | None = None
) -> Generator[int, None, ChildProcess]:
    """Start the process in steps. A generator: resume it when the yielded descriptor is readable;
    it then does not block. Returns the process, which has executed its command or waits for
    `start`.

    - `undo`: gets a function for each change that must be undone; the first one kills the process
    - `record`: writes the process to the container's state on disk, if the plan has that step
    - `times`: receives (label, nanoseconds of CLOCK_REALTIME) for each stage of `pyrunc.timings`,
      each parent step (`LINE.STEP`) and, in a timed program, each line of the plan

    Raises:
    - KernelError with the plan's line
    - NotFound or InvalidArgument, with the texts of Go's LookPath, when the command is missing or
      cannot be executed
    - EndedEarly
    - the errors of the parent's steps
    """
    running = _spawn(request)
    parent = ParentSide(request, running, undo, record, times)
    parent.note_time(SPAWNED)
    try:
        while True:
            if not running.queued:
                yield running.fileno()
            message = running.receive()
            if message is None:
                break
            parent.on_message(message)
    except OperationFailed as error:
        raise describe_failure(error, request.args) from None
    except HookFailed as error:
        # Imported late: an exec that runs a stored program has no use for plans.
        from pyrunc.plan.parent import HOOK_STDERR

        output = os.pread(request.descriptors[HOOK_STDERR], HOOK_OUTPUT_LIMIT_BYTES, 0)
        raise error.with_output(output) from None
    except GeneratorExit:  # the caller gives up: without the pid the process could not be killed
        parent.await_pid()
        raise
    finally:
        # Closing our end also ends a process that waits for us: it reads end of file, and exits
        # with 124.
        running.close()
    parent.note_time(RUNS)
    if parent.process is None or not parent.ready:
        raise EndedEarly("the container's process ended before it could run anything")
    return parent.process


def first_process_steps(
    request: Launch, undo: Undo, *, record: Recorder | None = None, times: Times | None = None
) -> Generator[int, None, ChildProcess]:
    """Run `launch_steps` for the first process of a cgroup, with the same result. On success, ends
    the placeholder process of a systemd scope. Raises ResourceExhausted when the OOM killer has
    ended the process early."""
    cgroup = request.cgroup
    try:
        process = yield from launch_steps(request, undo, record=record, times=times)
    except EndedEarly:
        # SIGKILL does not name its sender; memory.events of the new cgroup shows an OOM kill.
        if cgroup is not None and cgroup.oom_kills():
            raise ResourceExhausted(OOM_KILLED) from None
        raise
    if cgroup is not None:
        cgroup.occupied()
    return process


def _spawn(request: Launch) -> RunningProgram:
    """Spawn the launcher with the program and with copies of all descriptors of `request`."""
    fds = {number: request.descriptors[name] for name, number in request.lowered.numbers.items()}
    # sd_listen_fds(3) and podman's --preserve-fds count from 3.
    fds |= {3 + i: number for i, number in enumerate(request.preserve_fds)}
    if request.stdio_owner is not None:
        give_to(request.stdio_owner, request.stdio)
    stdio, null = own_nulls(request.stdio) if request.own_nulls else (request.stdio, -1)
    try:
        return spawn(request.lowered.program, stdio=stdio, fds=fds)
    finally:
        if null >= 0:
            os.close(null)


class ParentSide:
    """The parent's side of one launch: receives the process's messages and carries out the
    steps."""

    def __init__(
        self,
        request: Launch,
        running: RunningProgram,
        undo: Undo,
        record: Recorder | None = None,
        times: Times | None = None,
    ) -> None:
        self.request, self.undo, self.record = request, undo, record
        self.process: ChildProcess | None = None
        self.ready = False
        self._running, self._times = running, times

    def on_message(self, message: LauncherMessage) -> None:
        """Handle one message of the launcher or the process. Raises Error for an unexpected
        message."""
        # A process that was taken over could send descriptors with each message, and leave them
        # open here.
        if message.tag != DESCRIPTOR or self.process is None:
            close_all(message.fds)  # unexpected
        if message.tag == PID:
            self._add_process(message.value)
        elif message.tag == READY:
            self.ready = True
            debug.say("it is ready to run %s", self.request.args[0])
        elif message.tag == TIME and self._times is not None:
            number = self.request.lowered.program.lines[message.op_index].number
            self._times.append((str(number), message.value * 1_000_000_000 + message.extra))
        elif self.process is None:
            raise Error("the launcher ended before it reported the container's process")
        else:
            self._answer(message, self.process)

    def await_pid(self) -> None:
        """Wait until the launcher has reported the pid of the process that it clones. Returns
        without a pid when the launch fails, or no message comes for `PID_TIMEOUT_S`."""
        try:
            while self.process is None:
                message = self._running.receive(PID_TIMEOUT_S)
                if message is None:
                    return
                close_all(message.fds)
                if message.tag == PID:
                    self._add_process(message.value)
        except Error:  # the launch failed before, or no pid comes
            pass

    def _add_process(self, pid: int) -> None:
        """Open the process that the launcher has cloned; `undo` gets a step that kills it. Raises
        Error for a second process and for a process that is not our child."""
        if self.process is not None:
            raise Error("the launcher reported two processes")
        _require_child(pid)  # checked, because this pid will be killed on failure
        self.process = ChildProcess(pid)
        self.note_time(CLONED)
        self.undo.push(f"process {pid}", self.process.kill)
        debug.say("process %d exists", pid)

    def _answer(self, message: LauncherMessage, process: ChildProcess) -> None:
        """Handle a message of the process with the tag DESCRIPTOR, STATUS, PROGRESS or LISTENER.
        Raises HookFailed for STATUS, Error for an unexpected message, and the errors of a step."""
        if message.tag == DESCRIPTOR:
            if len(message.fds) != 1 or process.console_fd is not None:
                close_all(message.fds)
                count = len(message.fds)
                raise Error(
                    f"the container's process sent {count} descriptors instead of one terminal"
                )
            (process.console_fd,) = message.fds
            debug.say("received the terminal's master")
        elif message.tag == STATUS:
            raise HookFailed(message.value, message.extra)
        elif message.tag == PROGRESS:
            if message.value not in self.request.lowered.steps:
                raise Error("the container's process waits at a line of the plan that has no step")
            debug.say("process %d waits at plan line %d", process.pid, message.value)
            self._carry_out(message.value, process)
            self._running.release()
        elif message.tag == LISTENER:
            from pyrunc.kernel.process import open_from_process

            # The filter may forbid sendmsg(2) by now, so the process sends only the number (write),
            # and its parent fetches the descriptor.
            process.listener_fd = open_from_process(process.pidfd, message.value)
            debug.say("fetched the seccomp listener")
            self._carry_out(message.extra, process)
            self.note_time(str(message.extra))
            self._running.release()

    def _carry_out(self, line: int, process: ChildProcess) -> None:
        """Carry out the parent's steps at a line of the plan, in order."""
        steps = self.request.lowered.steps.get(line, ())
        if not steps:
            return
        from pyrunc.launch.steps import perform  # an exec that runs a stored program needs none

        for k, step in enumerate(steps, 1):
            try:
                perform(step, process, self)
            except Error as error:
                error.add_detail(f"plan line {line}.{k}")
                raise
            self.note_time(f"{line}.{k}")

    def note_time(self, label: str) -> None:
        """Record the time of a step or of a stage of `pyrunc.timings`."""
        if self._times is not None:
            self._times.append((label, time.time_ns()))


def _require_child(pid: int) -> None:
    """Raise Error unless the process is an unreaped child of ours."""
    try:
        # WNOWAIT leaves a process that has ended unreaped, so its number stays its own.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, OverflowError, OSError):
        raise Error(
            f"the launcher reported process {pid}, which is not a child of this process"
        ) from None


class HookFailed(PeerError):
    """The startContainer hook number `index` failed. `wait_status`: the hook's wait status; -1 if
    the hook was killed after its timeout."""

    def __init__(self, index: int, wait_status: int, output: bytes = b"") -> None:
        self.index, self.wait_status = index, wait_status
        if wait_status == -1:
            how = "it did not end in time and was killed"
        else:
            code = os.waitstatus_to_exitcode(wait_status)
            how = f"exit status {code}" if code >= 0 else f"killed by signal {-code}"
        text = output.decode("utf-8", "replace").strip()
        super().__init__(
            f"error running startContainer hook #{index}: {how}"
            + (f", stderr: {text}" if text else "")
        )

    def with_output(self, output: bytes) -> HookFailed:
        """Return the same error with the hook's stderr."""
        return HookFailed(self.index, self.wait_status, output)


def describe_failure(error: OperationFailed, args: Sequence[str]) -> Error:
    """Return the error to raise for a failed operation.

    If the command `args[0]` is missing or cannot be executed, the error has the text of Go's
    LookPath or of execve(2), because callers of a runtime search for these texts. All other errors
    are returned unchanged.
    """
    from pyrunc.plan.lower_process import NO_PROGRAM

    if error.mark != NO_PROGRAM:
        return error
    name = args[0]
    if error.errno in (ENOENT, ENOTDIR):
        # podman and docker tell "not found" (exit code 127) and "cannot be executed" (126) apart by
        # these texts.
        if "/" not in name:
            return NotFound(f'exec: "{name}": executable file not found in $PATH')
        return NotFound(f'exec: "{name}": stat {name}: {os.strerror(error.errno).lower()}')
    if error.errno == ELIBACC:  # `program.macros.execute`
        return NotFound(
            f"exec {name}: {os.strerror(ENOENT).lower()}"
            " (the file exists, but its interpreter or loader does not)"
        )
    if error.errno in (EACCES, EISDIR):
        return InvalidArgument(f'exec: "{name}": {os.strerror(error.errno).lower()}')
    text = os.strerror(error.errno).lower()
    if error.errno == E2BIG and error.note:
        text += f": {error.note.partition(', ')[0]}"  # without the plan's line
    failure = KernelError("exec", f'"{name}"', error.errno, text)
    return InvalidArgument(failure.message) if error.errno in NOT_EXECUTABLE else failure
