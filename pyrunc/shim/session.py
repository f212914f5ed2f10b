"""Containers and exec sessions: their processes, streams, and the order of steps at their end.

The end of a container:

- reap its first process
- kill the other processes in its cgroup
- read the OOM killer's count, because the cgroup may be removed at any moment
- log the rest of its output, for a bounded time, because a process that cannot be killed may keep
  the pipes open
- write exit.json
- notify the clients
"""

from __future__ import annotations

import os
import signal
import time

from pyrunc import atomic_file
from pyrunc.errors import Error, KernelError, WrongState, to_error
from pyrunc.kernel import terminal
from pyrunc.kernel.fd import close_all, closing_fd, duplicates
from pyrunc.kernel.pipe import unread_bytes
from pyrunc.shim import messages, tree
from pyrunc.shim.log_file import LogFile
from pyrunc.shim.messages import Exit
from pyrunc.shim.starter import StartedProcess
from pyrunc.shim.stdio import Follower, InputStream, OutputStream
from pyrunc.shim.stop import ContainerStop
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from pyrunc.cgroups.group import Cgroup
    from pyrunc.shim.loop import EventLoop, LaunchSteps, Timer
    from pyrunc.shim.oom import KillCounts
    from pyrunc.shim.reaper import ProcessEnd
    from pyrunc.shim.serve import ClientConnection, ShimCall
    from pyrunc.shim.worker import Worker

DRAIN_S = 0.5
LOG_RETRY_S = 0.5
# Limit for stdout and stderr together. Probes write less, and as JSON this fits in one packet.
SHORT_OUTPUT_BYTES = 4096


class SupervisedContainer:
    """A container that the shim starts or takes over. After the container's exit this object stays
    until the request `Forget`."""

    def __init__(
        self,
        loop: EventLoop,
        container_id: str,
        directory: str,
        kill_counts: KillCounts,
        on_exit: Callable[[SupervisedContainer], None],
        signal_by_runtime: Callable[[SupervisedContainer, int], None],
    ) -> None:
        """Prepare to supervise a container that will be started.

        - `on_exit`: is called when its exit.json is written
        - `signal_by_runtime`: sends a signal to a container of another OCI runtime
        """
        self.id, self.directory = container_id, directory
        self._kill_counts, self._oom_killed = kill_counts, False
        self.pid = self.start_time = self.started_at_ns = 0
        self.exit: Exit | None = None
        self.outputs: list[OutputStream] = []
        self.input: InputStream | None = None
        self._loop, self._on_exit = loop, on_exit
        self.starting: Worker | LaunchSteps | None = None
        self._process: StartedProcess | None = None
        self._ended: ProcessEnd | None = None
        self._finished_at_ns = 0
        self._log = LogFile(None)
        self._stop: ContainerStop | None = None
        self._signal_by_runtime = signal_by_runtime

    @property
    def running(self) -> bool:
        """Return whether the process was started and its exit is not recorded yet."""
        return self._process is not None and self.exit is None

    # -- start

    def open_log(self, path: str | None, directory: str = "") -> None:
        """Open the log at `path`. Must be called before the first output. `directory`: the pod's
        log folder. Raises KernelError."""
        self._log = LogFile(path, on_waiting=self._retry_log_later, directory=directory)
        self._log.open()

    def started(
        self, process: StartedProcess, streams: ProcessPipes, *, stdin: bool, once: bool
    ) -> None:
        """Take over the started process, which may have ended already, and its streams. Raises
        OSError; process and streams then still belong to the caller.

        - `stdin`: clients may write to the process's stdin
        - `once`: close stdin when the first client's input ends, unless stdin is a terminal
        """
        outputs = {"stdout": streams.stdout, "stderr": streams.stderr}
        fd = streams.stdin
        tty = process.console_fd is not None
        if process.console_fd is not None:
            outputs = {"stdout": process.console_fd}
            fd = os.dup(process.console_fd) if stdin else -1
        self._take(process, time.time_ns(), outputs)
        if self._stop:  # requested during the start
            self.kill()
        if stdin:
            # As in containerd (internal/cri/io, ContainerIO.Attach): a terminal's input does not
            # end with its first client.
            self.input = InputStream(self._loop, fd, once and not tty)

    def take_over(
        self,
        record: messages.StoredContainer,
        fds: Sequence[int],
        stdin: Sequence[int],
        *,
        once: bool,
    ) -> StartedProcess:
        """Supervise the first process of a container whose shim has ended. Afterwards this object
        owns all descriptors. Raises InvalidArgument, KernelError, OSError.

        - `record`, `fds`: the data and descriptors that the keeper has stored for the container
        - `stdin`: the writing end of the process's stdin, empty if it was not saved
        - `once`: close stdin when the first client's input ends, unless stdin is a terminal
        """
        process = StartedProcess.from_stored(record, fds)
        try:
            self.open_log(record.log_path, record.log_directory)
        except KernelError as error:  # its lines wait, as when they cannot be written
            warn(f"container {self.id}: {error}")
        terminal_input = -1
        if record.stdin and process.console_fd is not None:
            # Before `_take`: when this fails, the caller closes `fds`, which must not be watched.
            terminal_input = os.dup(process.console_fd)
        self._take(process, record.started_at_ns, dict(zip(record.outputs, fds[1:], strict=True)))
        if terminal_input >= 0:
            self.input = InputStream(self._loop, terminal_input, False)
        elif stdin:
            self.input = InputStream(self._loop, stdin[0], once)
        return process

    def kill_sessions(self, leaders: Sequence[Sequence[int]]) -> Generator[None, None, None]:
        """Kill the exec sessions that an ended shim has left, in short steps (`EventLoop.spread`).
        `leaders`: pid and start time of the first process of each session that the server knows.

        Also kills the sessions that `tree.orphaned_sessions` finds, because a server that was
        killed together with the shim knows none.
        """
        # In the first step, because new sessions may be started between later steps.
        sessions = tree.orphaned_sessions(self.pid, self.processes())
        for pid, start_time in leaders:
            leader = tree.stat(pid)
            if leader is not None and leader.start_time == start_time:
                sessions[pid] = start_time
        for pid, start_time in sessions.items():
            yield from tree.kill_session(pid, start_time, self.processes)

    def _take(
        self, process: StartedProcess, started_at_ns: int, outputs: Mapping[str, int]
    ) -> None:
        self._process = process
        # Released here: `starting` refers to the launch, whose program takes 64 KiB.
        self.starting = None
        self.pid = process.pid
        self.start_time = process.start_time
        self.started_at_ns = started_at_ns
        self.outputs = [
            OutputStream(self._loop, fd, name, self._log, self._complete_if_silent)
            for name, fd in outputs.items()
        ]
        try:
            self._kill_counts.watch(process.group)
        except (Error, OSError) as error:
            warn(f"container {self.id}: cannot watch for OOM kills: {error}")

    def store(self) -> tuple[messages.StoredContainer, list[int]]:
        """Return the data and the descriptors that the keeper is to store for the container. The
        descriptors are copies, which the caller closes. Raises WrongState when the first process
        has ended."""
        pidfd = self.open_pidfd()
        process = self._process
        assert process is not None
        outputs = [output for output in self.outputs if not output.ended]
        record = messages.StoredContainer(
            pid=process.pid,
            start_time=process.start_time,
            group=process.group.record(),
            poststop=process.has_poststop,
            other=process.of_other_runtime,
            started_at_ns=self.started_at_ns,
            terminal=process.console_fd is not None,
            stdin=self.input is not None,
            log_path=self._log.path,
            log_directory=self._log.directory,
            outputs=[output.stream for output in outputs],
        )
        with closing_fd(pidfd):
            return record, duplicates([pidfd, *(output.fd for output in outputs)])

    def failed(self, error: Exception) -> None:
        """Write the exit of a container whose start has failed with `error`."""
        self.starting = None
        self.exit = Exit.of_failed_start(to_error(error, "start").message)
        self._write_exit(self.exit)
        self._log.close()
        if self._stop:
            self._stop.exited()

    # -- running

    def attach(self, names: Sequence[str]) -> list[int]:
        """Make pipes to the container's streams; return the client's ends in the order stdin,
        stdout, stderr."""
        ends: list[int] = []
        try:
            self._attach(names, ends)
        except OSError:
            # The other ends close when they notice this.
            close_all(ends)
            raise
        return ends

    def _attach(self, names: Sequence[str], ends: list[int]) -> None:
        if "stdin" in names:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            ends.append(writing)
            if self.input:
                self.input.feed_from(reading)
            else:
                os.close(reading)  # no stdin: the client's first write fails with EPIPE
        outputs = {output.stream: output for output in self.outputs}
        for name in ("stdout",) if self._has_terminal() else ("stdout", "stderr"):
            if name in names:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                ends.append(reading)
                follower = Follower(self._loop, writing)
                # A shim that takes a container over gets no stream that had ended before.
                if name not in outputs or outputs[name].ended:
                    follower.finish()
                else:
                    outputs[name].follow(follower)

    def _has_terminal(self) -> bool:
        return self._process is not None and self._process.console_fd is not None

    def send_signal(self, number: int) -> None:
        """Send a signal to the first process. Does nothing if the process has ended. If another OCI
        runtime has started the container, that runtime sends the signal."""
        if self._process and self._ended is None:
            if self._process.of_other_runtime:
                self._signal_by_runtime(self, number)
            if not self._process.of_other_runtime or number == signal.SIGKILL:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the container."""
        self.send_signal(signal.SIGKILL)
        if self._process:
            self.group.kill()

    def stop(self, call: ShimCall, number: int, timeout_s: float) -> None:
        """Stop the container: send signal `number`, SIGKILL after `timeout_s`, and answer `call`
        with the exit. An unfinished start is aborted."""
        if not self.exit and self._process is None and self.starting:
            self.starting.kill()
        if self.exit:
            call.answer(self.exited())
            return
        self._stop = self._stop or ContainerStop(self._loop, self)
        self._stop.request(call, number, timeout_s)

    @property
    def group(self) -> Cgroup:
        """Return the container's cgroup. The container must have been started."""
        assert self._process is not None
        return self._process.group

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size, in characters. Raises WrongState when the container has no
        terminal."""
        console = self._process.console_fd if self._process else None
        if console is None or not self.outputs or self.outputs[0].ended:
            raise WrongState(f"container {self.id} has no terminal")
        terminal.set_size(console, width, height)

    def reopen_log(self) -> None:
        """Open the container's log file anew, after kubelet has renamed it. Raises KernelError."""
        self._log.open()

    @property
    def has_poststop(self) -> bool:
        """Return whether `Starter.after_stop` must run after the container's end: for poststop
        hooks, or for resctrl groups that belong to the container alone."""
        return self._process is not None and self._process.has_poststop

    @property
    def of_other_runtime(self) -> bool:
        """Return whether another OCI runtime has started the container."""
        return self._process is not None and self._process.of_other_runtime

    def open_pidfd(self) -> int:
        """Open a pidfd of the first process. Raises WrongState as soon as the process has ended,
        also while `running` is still true."""
        if self._process is None or self._ended:
            raise WrongState(f"container {self.id} is not running")
        return self._process.open_pidfd()

    def processes(self) -> list[int]:
        """Return the pids of all processes, in the shim's pid namespace. [] after the exit, because
        the cgroup may be gone."""
        return self.group.processes() if self.running else []

    def exited(self) -> Exit:
        """Return the container's exit. Raises WrongState if there is none yet."""
        if self.exit is None:
            raise WrongState(f"container {self.id} is still running")
        return self.exit

    def state(self) -> messages.ContainerState:
        """Return the container's state, for a server that was restarted."""
        return messages.ContainerState(
            self.id, self.pid, self.start_time, self.started_at_ns, self.running, self.exit
        )

    # -- end

    def ended(self, ended: ProcessEnd) -> None:
        """Handle the end of the first process: kill the container's other processes, log the rest
        of their output, and write the exit."""
        self._ended, self._finished_at_ns = ended, time.time_ns()
        # In a pid namespace of the container alone, the kernel has killed all others with process 1
        # (pid_namespaces(7)). With `hostPID` or a shared pid namespace, daemons would live on and
        # keep the pipes open.
        self._kill_the_rest()
        self._count_kills(ended)
        for output in self.outputs:
            output.drain()
        self._complete_if_silent()
        if self.exit is None:
            self._loop.after(DRAIN_S, self._end_streams)

    def stop_reading(self) -> None:
        """Log all output that was read, also unfinished lines, and read no more."""
        for output in self.outputs:
            output.stop_reading()
        self._log.retry()

    def read_on(self) -> None:
        """Read output again after `stop_reading`."""
        for output in self.outputs:
            output.read_on()

    @property
    def log_waits(self) -> bool:
        """Return whether log lines wait in memory because they could not be written."""
        return self._log.waiting

    def release(self) -> None:
        """Close all descriptors of a container that is being forgotten."""
        self._end_streams()
        for output in self.outputs:
            for follower in list(output.followers):
                follower.close()
        if self._process:
            self._process.close_pidfd()
        if self.input:
            self.input.close()
        self._log.close()

    def _kill_the_rest(self) -> None:
        assert self._process is not None
        try:
            self.group.kill()
        except (Error, OSError) as error:
            warn(f"container {self.id}: cannot kill the processes left: {error}")

    def _complete_if_silent(self) -> None:
        if self._ended and self.exit is None and all(output.ended for output in self.outputs):
            self._complete()

    def _end_streams(self) -> None:
        for output in self.outputs:
            output.end()

    def _complete(self) -> None:
        """Write exit.json after all output is logged, then notify the clients."""
        assert self._ended is not None
        ended, oom_killed = self._ended, self._oom_killed
        if ended.exit_code is None:
            end = Exit.unknown(self._finished_at_ns, messages.LOST_CODE)
            self.exit = end.replace(oom_killed=oom_killed)
        else:
            self.exit = Exit(
                ended.exit_code,
                ended.signal,
                self._finished_at_ns,
                oom_killed=oom_killed,
                reason=messages.OOM_KILLED if oom_killed else "",
                message="",
            )
        self._write_exit(self.exit)
        if self.input:
            self.input.close()
        # While a full disk holds lines back, the log stays open; `_retry_log` closes it.
        if not self._log.waiting:
            self._log.close()
        self._on_exit(self)
        if self._stop:
            self._stop.exited()

    def _write_exit(self, end: Exit) -> None:
        """Write exit.json before any client is notified. A failure is reported on stderr and does
        not prevent the notification."""
        try:
            path = f"{self.directory}/{messages.EXIT_RECORD}"
            atomic_file.write_json(path, end.to_fields())
        except OSError as error:
            warn(f"cannot write an exit record in {self.directory}: {error}")

    def _count_kills(self, ended: ProcessEnd) -> None:
        try:
            self._oom_killed = self._kill_counts.killed(self.group, ended.exit_code)
        except (Error, OSError) as error:
            warn(f"container {self.id}: cannot read the number of OOM kills: {error}")

    def _retry_log_later(self) -> None:
        self._loop.after(LOG_RETRY_S, self._retry_log)

    def _retry_log(self) -> None:
        if not self._log.retry():
            self._retry_log_later()
        elif self.exit:
            self._log.close()


class ProcessPipes:
    """The pipes of a process that is about to start.

    - `stdio`: the process's ends, with /dev/null in place of a missing pipe
    - `stdin`, `stdout`, `stderr`: our ends, -1 for a missing pipe
    """

    def __init__(self, *, stdin: bool, stdout: bool = True, stderr: bool = True) -> None:
        """Open the pipes. Raises OSError."""
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.stdin = self.stdout = self.stderr = -1
        their_stdin = their_stdout = their_stderr = self._null
        try:
            if stdin:
                their_stdin, self.stdin = os.pipe2(os.O_CLOEXEC)
            if stdout:
                self.stdout, their_stdout = os.pipe2(os.O_CLOEXEC)
            if stderr:
                self.stderr, their_stderr = os.pipe2(os.O_CLOEXEC)
        except OSError:
            close_all({their_stdin, their_stdout, their_stderr, self._null, *self.ours()})
            raise
        self.stdio = (their_stdin, their_stdout, their_stderr)

    def ours(self) -> list[int]:
        """Return our ends that exist, in the order stdin, stdout, stderr."""
        return [fd for fd in (self.stdin, self.stdout, self.stderr) if fd >= 0]

    def read_short_output(self, limit: int) -> list[bytes] | None:
        """Read the output that is in the pipes of stdout and stderr now, and close our ends. If the
        output is longer than `limit` bytes, do nothing and return None."""
        sizes = [unread_bytes(fd) for fd in (self.stdout, self.stderr)]
        if sum(sizes) > limit:
            return None
        fds = zip((self.stdout, self.stderr), sizes, strict=True)
        output = [os.read(fd, size) if size else b"" for fd, size in fds]
        close_all(self.ours())
        return output

    def close_theirs(self) -> None:
        """Close the process's ends in the shim. The process has its own copies."""
        close_all({*self.stdio, self._null})

    def close(self) -> None:
        """Close both ends after a failed start."""
        self.close_theirs()
        close_all(self.ours())


class ExecAnswer:
    """Answers a `StartExec` when its process runs. The answer has the process's streams and is sent
    at once. If the request has `exit_within_ms`, the answer waits up to that time for the exit, to
    report exit code and output instead."""

    def __init__(
        self, loop: EventLoop, call: ShimCall, process: StartedProcess, pipes: ProcessPipes
    ) -> None:
        """Prepare the answer. This object owns `pipes`, the process's pipes. Raises OSError;
        the pipes then still belong to the caller."""
        self._loop, self._call, self._process, self._pipes = loop, call, process, pipes
        # A copy: the answer closes its descriptors when they are sent, and the session still needs
        # the master for `resize`.
        self._master = [] if process.console_fd is None else [os.dup(process.console_fd)]
        self._runs_since_s = time.perf_counter()
        self._timer: Timer | None = None

    def send_within(self, wait_ms: int) -> None:
        """Send the streams after `wait_ms`, or now if it is 0. If `send_exit` is called earlier,
        that call answers instead."""
        if wait_ms > 0:
            self._timer = self._loop.after(wait_ms / 1000, self._send_streams)
        else:
            self._send_streams()

    def send_exit(self, exit_code: int) -> bool:
        """Answer with the exit code and the output of the process, which has ended; return True.
        If the answer was sent before, return False. If the output is long, answer with the streams
        and return False."""
        if self._timer is None:
            return False
        self._timer.cancel()
        output = self._pipes.read_short_output(SHORT_OUTPUT_BYTES)
        if output is None:
            self._send_streams()
            return False
        process = self._process
        command = ("command", self._runs_since_s, time.perf_counter(), -1)
        answer = messages.ExecStarted(
            process.pid,
            process.start_time,
            [*process.parts, command],
            exit_code,
            [data.decode("latin-1") for data in output],
        )
        self._call.answer(answer)
        return True

    def _send_streams(self) -> None:
        """Answer with the process's terminal or pipes."""
        self._timer = None
        process = self._process
        answer = messages.ExecStarted(process.pid, process.start_time, process.parts)
        self._call.answer(answer, [*self._master, *self._pipes.ours()])


class SupervisedExec:
    """An exec session: a process that a client has started in a running container. The session is
    killed when the client disconnects."""

    def __init__(
        self, exec_id: str, container: SupervisedContainer, owner: ClientConnection
    ) -> None:
        self.id, self.container, self.owner = exec_id, container, owner
        self.starting: Worker | LaunchSteps | None = None
        self.pid = self._start_time = 0
        self.exited = False
        self.killed = False
        self._console_fd: int | None = None

    def started(self, process: StartedProcess) -> None:
        """Take over the started process. If the session was `killed` meanwhile, the caller must
        kill the process."""
        self.pid, self._start_time = process.pid, process.start_time
        self._console_fd, self.starting = process.console_fd, None

    def kill(self) -> Generator[None, None, None]:
        """Kill the process and all its descendants, in short steps (`EventLoop.spread`). An
        unfinished start is aborted."""
        self.killed = True
        if not self.pid:
            if self.starting:
                self.starting.kill()
        elif self.exited and tree.stat(self.pid) is not None:
            # Another process has the pid, so no member of the session is left. `kill_session` might
            # not notice: start times are counted in ticks of 10 ms, and may be equal.
            return
        elif self.container.running:
            yield from tree.kill_session(self.pid, self._start_time, self._processes)
        elif not self.exited:
            # The container's cgroup may be gone, so the session's tree cannot be listed any more.
            os.kill(self.pid, signal.SIGKILL)  # our child, not reaped

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size, in characters. Raises WrongState when the session has no
        terminal."""
        if self._console_fd is None:
            raise WrongState(f"exec session {self.id} has no terminal")
        terminal.set_size(self._console_fd, width, height)

    def ended(self) -> None:
        """Note the end of the process and close its terminal."""
        self.exited = True
        if self._console_fd is not None:
            os.close(self._console_fd)
            self._console_fd = None

    def _processes(self) -> list[int]:
        return [*self.container.processes(), *([] if self.exited else [self.pid])]
