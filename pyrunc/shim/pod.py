"""One pod of a shim: answers the calls about the pod and supervises its processes."""

from __future__ import annotations

import os
import signal

from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, NotFound, WrongState
from pyrunc.kernel.fd import close_all, stream_name
from pyrunc.launch.run import drive
from pyrunc.shim import compile, messages
from pyrunc.shim.loop import LaunchSteps
from pyrunc.shim.network import open_network
from pyrunc.shim.oom import KillCounts
from pyrunc.shim.serve import ShimServer, handler
from pyrunc.shim.session import ExecAnswer, ProcessPipes, SupervisedContainer, SupervisedExec
from pyrunc.shim.starter import ForkedProcess, PauseProcess, StartedProcess
from pyrunc.shim.warn import warn
from pyrunc.shim.worker import Worker, WorkerLost
from pyrunc.timings import Timings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Protocol, TypeVar

    from pyrunc.container.state import State
    from pyrunc.ipc import Message
    from pyrunc.shim.compile import CompiledContainer, CompiledPause, Prepared
    from pyrunc.shim.loop import Timer
    from pyrunc.shim.pods import ShimPods
    from pyrunc.shim.reaper import ProcessEnd
    from pyrunc.shim.serve import ClientConnection, Handler, ShimCall

    Compiled = TypeVar("Compiled", covariant=True)

    class LaunchCompiler(Protocol[Compiled]):
        """Compiles a process by `compile`. If `fork_first` returns a function, a fork of the shim
        must run it first, and `compile` gets its result."""

        def fork_first(self) -> Callable[[], Prepared] | None: ...
        def compile(self, prepared: Prepared | None) -> Compiled: ...


# For this time after an exec session's end, a client can kill the processes that it left running.
ENDED_EXEC_S = 5.0
PAUSE_GRACE_S = 0.5
# rmdir(2) gives EBUSY while the cgroup has a process that is not a zombie (cgroups(7)). A killed
# process first releases its memory, then becomes a zombie.
GROUP_RETRY_S = 0.1
GROUP_TRIES = 50
END_RETRY_S = 0.02
END_TRIES = 500
# The server kills a shim that has not ended a pod within 20 s (`pod.SHIM_TIMEOUT_S`).
FOLDER_WAIT_S = 15.0
# A server may die between `take_pod` and its first call, and never come back.
ABANDONED_AFTER_S = 60.0


class ShimPod:
    """One pod that the shim serves.

    - `sandbox_dir`: the folder with the sandbox's socket and state
    - `containers_dir`: the folder with a state folder for each container
    """

    def __init__(
        self,
        pods: ShimPods,
        sandbox_dir: str,
        containers_dir: str,
        listener: int,
        network: int = -1,
    ) -> None:
        """Serve calls on the socket `listener`. `network`: the pod's network namespace, -1 if it
        has none yet."""
        self.sandbox_dir, self._containers_dir = sandbox_dir, containers_dir
        self._pods = pods
        self._starter = pods.starter
        self.loop = pods.loop
        self._reaper = pods.reaper
        self._created: dict[str, CompiledContainer] = {}
        self._containers: dict[str, SupervisedContainer] = {}
        self._execs: dict[str, SupervisedExec] = {}
        self._pause: PauseProcess | None = None
        self._pause_running = self._pause_starting = False
        self._pause_waiting: list[ShimCall] = []
        self._network = network
        self._ended = False
        self._kill_counts = KillCounts()
        # Time limit of each running hook or command of another runtime -> container id.
        self._folder_uses: dict[Timer, str] = {}
        self._waiting: list[ShimCall] = []  # calls that wait until a use of the folder ends
        self._signals_in_flight: set[tuple[str, int]] = set()
        self._server = ShimServer(self.loop, listener, self._calls(), self._kill_execs_of)
        self.loop.after(ABANDONED_AFTER_S, self._end_if_abandoned)

    def close(self) -> None:
        """Close all connections and stop serving."""
        self._server.close()
        for compiled in self._created.values():
            compiled.close()
        self._created.clear()
        for container in self._containers.values():
            container.release()
        self._containers.clear()
        self._drop_network()

    def stop_reading(self) -> list[str]:
        """Log all output that was already read from the containers, and read no more. Return the
        ids of the containers whose log could not be written, because the disk is full for
        example."""
        for container in self._containers.values():
            container.stop_reading()
        return [container.id for container in self._containers.values() if container.log_waits]

    def read_on(self) -> None:
        """Read the output of the containers again after `stop_reading`."""
        for container in self._containers.values():
            container.read_on()

    def descriptors(self) -> list[int]:
        """Return the sockets' descriptors, which a fork must close."""
        return self._server.descriptors()

    def _calls(self) -> list[Handler]:
        return [
            handler(messages.StartPause, self._start_pause),
            handler(messages.CreateContainer, self._create_container),
            handler(messages.DropContainer, self._drop_container),
            handler(messages.StartContainer, self._start_container),
            handler(messages.StartExec, self._exec),
            handler(messages.KillExec, self._kill_exec),
            handler(messages.Stop, self._stop),
            handler(messages.Attach, self._attach),
            handler(messages.Resize, self._resize),
            handler(messages.ReopenLog, self._reopen_log),
            handler(messages.GetState, self._state),
            handler(messages.StopPause, self._stop_pause),
            handler(messages.Forget, self._forget),
            handler(messages.Shutdown, self._shutdown),
            handler(messages.TakeOverPause, self._take_over_pause),
            handler(messages.TakeOverContainer, self._take_over_container),
        ]

    # -- the network namespace, which is there before the pause process

    def netns_path(self) -> str | None:
        """Return the path of the pod's network namespace; None if the pod has none. The path is
        valid as long as the shim lives."""
        return f"/proc/{os.getpid()}/fd/{self._network}" if self._network >= 0 else None

    def _drop_network(self) -> None:
        """Close the pod's network namespace, if it has one."""
        if self._network >= 0:
            os.close(self._network)
            self._network = -1

    # -- the pause process

    def _start_pause(self, call: ShimCall, request: messages.StartPause) -> None:
        if self._pause or self._pause_starting:
            raise AlreadyExists("the pod's pause process has been started already")
        compiler = self._starter.pause_compiler(self.sandbox_dir, timed=request.timed)
        self._pause_starting = True

        def launch(pause: CompiledPause) -> None:
            try:
                self._launch_pause(call, pause)
            except Exception as error:
                pause.close()
                close_all(pause.pins.values())
                self._clear_away(pause.cgroup)
                self._pause_failed(call, error)

        self._compile(compiler, launch, lambda error: self._pause_failed(call, error))

    def _launch_pause(self, call: ShimCall, compiled: CompiledPause) -> None:
        launch = compiled.launch
        if launch is not None and launch.pinned and self._network < 0:
            self._network = open_network()

        def done(pause: PauseProcess) -> None:
            self._pause_starting, self._pause_running, self._pause = False, True, pause
            if pause.netns_fd is not None:
                self._network = pause.netns_fd
            self._store_pause(pause)
            path = pause.netns_path()
            call.answer(messages.PauseStarted(pause.pid, pause.start_time, path, pause.parts))
            # After the answer: a process that has ended already is reaped within this call, and its
            # event must not overtake the pid.
            self._reaper.expect(pause.pid, self._pause_ended)
            if self._pause_waiting:
                self._kill_pause()
            # containers share its parent cgroup, and one may end before its start is reported
            if pause.group:
                self._kill_counts.watch(pause.group)

        def failed(error: Exception) -> None:
            self._clear_away(compiled.cgroup)
            self._pause_failed(call, error)

        network = self._network if self._network >= 0 else None
        LaunchSteps(self.loop, self._reaper, self._starter.pause(compiled, network), done, failed)

    def _pause_failed(self, call: ShimCall, error: Exception) -> None:
        self._pause_starting = False
        call.fail(error)
        self._answer_pause_stops()

    def _stop_pause(self, call: ShimCall, request: messages.StopPause) -> None:
        """End the pause process, and answer `call` after its exit. If the process is still
        being started, it is killed when its start is done: the client that requested the start has
        given up."""
        if self._pause_starting:
            self._pause_waiting.append(call)
            return
        if not self._pause or not self._pause_running:
            call.answer()
            return
        self._pause_waiting.append(call)
        self._pause.send_signal(signal.SIGTERM)
        self.loop.after(PAUSE_GRACE_S, self._kill_pause)

    def _take_over_pause(self, call: ShimCall, request: messages.TakeOverPause) -> None:
        """Supervise the pause process of a shim that has ended, and take over the pod's network
        namespace."""
        if self._pause or self._pause_starting:
            raise AlreadyExists("the pod has a pause process")
        record, fds = self._pods.keeper.get(self._pause_name, messages.StoredPause)
        self._pause = PauseProcess.from_stored(record, fds)
        self._store_pause(self._pause)
        self._pause_running = True
        self._drop_network()
        self._network = -1 if self._pause.netns_fd is None else self._pause.netns_fd
        call.answer(messages.NetworkNamespace(self.netns_path()))
        if self._pause.group:
            self._kill_counts.watch(self._pause.group)
        self._reaper.expect_other(self._pause, self._pause_ended)

    def _store_pause(self, pause: PauseProcess) -> None:
        """Store the pause process in the keeper, so that another shim can take it over."""
        self._pods.keeper.put(self._pause_name, pause.store)

    @property
    def _pause_name(self) -> str:
        return messages.StoredPause.name_of(os.path.basename(self.sandbox_dir))

    def _kill_pause(self) -> None:
        if self._pause and self._pause_running:
            self._pause.send_signal(signal.SIGKILL)

    def _pause_ended(self, ended: ProcessEnd) -> None:
        self._pause_running = False
        assert self._pause is not None
        self._pods.keeper.drop(self._pause_name)
        self._pause.ended()
        self._pause.close_pidfd()
        if self._pause.group:
            self._remove(self._pause.group)
        self._server.event(messages.PauseExited(ended.exit_code))
        self._answer_pause_stops()

    def _answer_pause_stops(self) -> None:
        waiting, self._pause_waiting = self._pause_waiting, []
        for call in waiting:
            call.answer()

    # -- containers

    def _create_container(self, call: ShimCall, request: messages.CreateContainer) -> None:
        container_id = request.container
        if container_id in self._containers:
            raise AlreadyExists(f"container {container_id} has been started already")
        self._drop(container_id)
        directory, fds = f"{self._containers_dir}/{container_id}", call.take_fds()

        def created(compiled: CompiledContainer) -> None:
            close_all(fds)
            self._created[container_id] = compiled
            call.answer(messages.ContainerCreated(compiled.parts.noted))

        def failed(error: Exception) -> None:
            close_all(fds)
            call.fail(error)

        try:
            compiler = self._starter.container_compiler(directory, request, fds)
        except Exception as error:
            failed(error)
        else:
            self._compile(compiler, created, failed)

    def _drop_container(self, call: ShimCall, request: messages.DropContainer) -> None:
        self._drop(request.container)
        call.answer()

    def _drop(self, container_id: str) -> None:
        compiled = self._created.pop(container_id, None)
        if compiled is not None:
            compiled.close()

    def _start_container(self, call: ShimCall, request: messages.StartContainer) -> None:
        container_id = request.container
        if container_id in self._containers:
            raise AlreadyExists(f"container {container_id} has been started already")
        # the paths of its namespaces contain its pid, which may be reused
        if self._pause and not self._pause_running:
            raise WrongState("the pod's pause process has ended")
        compiled = self._created.pop(container_id, None)
        if compiled is None:
            raise NotFound(f"container {container_id} was not created in this shim")
        container = self._containers[container_id] = self._new_container(container_id)
        try:
            self._launch(container, call, compiled)
        except Exception as error:
            compiled.close()
            self._start_failed(container, compiled, error)
            raise

    def _start_failed(
        self, container: SupervisedContainer, compiled: CompiledContainer, error: Exception
    ) -> None:
        """Kill the processes of a failed start, remove its cgroup and write the container's exit.
        Then run its poststop hooks or, if another OCI runtime runs it, that runtime's `delete`."""
        self._clear_away(compiled.cgroup)
        container.failed(error)
        # runtime-spec, runtime.md, "Lifecycle": a failed start goes on with the steps of delete.
        must_clean_up = compiled.poststop
        if compiled.file.runtime is not None:
            # If another runtime fails, the fork that ran it deletes the container, unless the fork
            # was killed.
            must_clean_up = isinstance(error, WorkerLost)
        if must_clean_up:
            self._after_stop(container)

    def _new_container(self, container_id: str) -> SupervisedContainer:
        return SupervisedContainer(
            self.loop,
            container_id,
            f"{self._containers_dir}/{container_id}",
            self._kill_counts,
            self._container_exited,
            self._signal_by_runtime,
        )

    def _launch(
        self, container: SupervisedContainer, call: ShimCall, compiled: CompiledContainer
    ) -> None:
        file, parts = compiled.file, Timings()
        container.open_log(file.log_path, file.log_directory or "")
        tty = file.tty
        streams = ProcessPipes(stdin=file.stdin and not tty, stdout=not tty, stderr=not tty)
        parts.end("log and pipes")

        def done(process: StartedProcess) -> None:
            parts.include(process.parts)
            try:
                container.started(process, streams, stdin=file.stdin, once=file.stdin_once)
            except OSError as error:
                process.discard()
                failed(error)
                return
            _record(container, compiled.state, streams)
            streams.close_theirs()
            parts.end("record")
            self._pods.keeper.put(messages.StoredContainer.name_of(container.id), container.store)
            started = messages.ContainerStarted(
                container.pid, container.start_time, container.started_at_ns, parts.noted
            )
            call.answer(started)
            # After the record and the answer: a short-lived process has ended by now, and this call
            # writes its exit and sends the event.
            self._reaper.expect(container.pid, container.ended, container.start_time)

        def failed(error: Exception) -> None:
            streams.close()
            self._start_failed(container, compiled, error)
            call.fail(error)

        steps = self._starter.container(compiled, container.directory, streams.stdio, self._pause)
        forked = self._starter.needs_fork(compiled)
        container.starting = self._start(steps, done, failed, forked=forked)
        if forked:
            compiled.leave_to_fork()

    def _take_over_container(self, call: ShimCall, request: messages.TakeOverContainer) -> None:
        """Supervise a container of a shim that has ended. The container's exec sessions are killed,
        because they have no client any more."""
        container_id = request.container
        if container_id in self._containers:
            raise AlreadyExists(f"container {container_id} is already in this shim")
        container = self._new_container(container_id)
        name = messages.StoredContainer.name_of(container_id)
        record, fds = self._pods.keeper.get(name, messages.StoredContainer)
        stdin = call.take_fds()
        try:
            process = container.take_over(record, fds, stdin, once=request.stdin_once)
        except BaseException:
            close_all([*fds, *stdin])
            raise
        self._containers[container_id] = container
        self._pods.keeper.put(name, container.store)
        call.answer()
        self._reaper.expect_other(process, container.ended)
        # Last, because it reads /proc for each process of the container; the exit is watched by
        # then.
        self.loop.spread(container.kill_sessions(request.sessions), _warn_of)

    def _take_back(self, prepared: Prepared | None) -> None:
        """Undo what a fork has prepared for a process that could not be compiled: close the
        descriptors and remove the cgroup."""
        if prepared is None:
            return
        fields, descriptors = prepared
        close_all(descriptors)
        if "cgroup" in fields:
            self._clear_away(Cgroup.from_record(fields["cgroup"]))

    def _clear_away(self, group: Cgroup | None) -> None:
        """Kill the processes that a failed start has left in the cgroup `group`, and remove the
        cgroup. Does nothing for None."""
        if group is None:
            return
        try:
            group.kill()
            self._remove(group)
        except (Error, OSError) as error:
            warn(f"cannot clean up after a failed start: {error}")

    def _container_exited(self, container: SupervisedContainer) -> None:
        # exit.json is written, so no other shim needs the descriptors.
        self._pods.keeper.drop(messages.StoredContainer.name_of(container.id))
        self._server.event(container.exited().replace(container=container.id))
        compile.forget(container.directory)
        if not container.of_other_runtime:
            self._remove(container.group)
        if container.of_other_runtime or container.has_poststop:
            self._after_stop(container)

    def _after_stop(self, container: SupervisedContainer) -> None:
        """Clean up after the container's end, in the background: run its poststop hooks or, if
        another OCI runtime runs it, that runtime's `delete`."""

        def done(error: Exception | None) -> None:
            if error is not None:
                warn(f"container {container.id}: cannot clean up after its end: {error}")
            if container.of_other_runtime:
                self._remove(container.group)

        self._in_folder(
            container, lambda: self._starter.after_stop(container.id, container.directory), done
        )

    def _in_folder(
        self,
        container: SupervisedContainer,
        work: Callable[[], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Run `work` as `_in_background` does. `work` uses the container's folder, so `forget` and
        `shutdown` wait until it has ended, for at most FOLDER_WAIT_S."""

        def leave() -> None:
            use.cancel()
            self._folder_uses.pop(use, None)
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                self._server.dispatch(call)

        def ended(error: Exception | None) -> None:
            on_end(error)
            leave()

        use = self.loop.after(FOLDER_WAIT_S, leave)
        self._folder_uses[use] = container.id
        self._in_background(work, ended)

    def _signal_by_runtime(self, container: SupervisedContainer, number: int) -> None:
        """Send a signal by the `kill` of the OCI runtime that runs the container, in the
        background. Does nothing while an earlier `kill` with the same signal runs. Otherwise the
        commands would pile up, because a stop repeats its last signal until the container has
        ended."""
        key = (container.id, number)
        if key in self._signals_in_flight:
            return

        def done(error: Exception | None) -> None:
            self._signals_in_flight.discard(key)
            if error is not None and container.running:
                warn(f"container {container.id}: cannot send signal {number}: {error}")

        self._signals_in_flight.add(key)
        self._in_folder(
            container, lambda: self._starter.send_signal(container.directory, number), done
        )

    def _stop(self, call: ShimCall, request: messages.Stop) -> None:
        self._container(request.container).stop(call, _checked(request.signal), request.timeout_s)

    def _attach(self, call: ShimCall, request: messages.Attach) -> None:
        names = [name for name in messages.STREAMS if getattr(request, name)]
        call.answer(None, self._running(request.container).attach(names))

    def _resize(self, call: ShimCall, request: messages.Resize) -> None:
        if request.exec is not None:
            session = self._execs.get(request.exec)
            if session is None:
                raise NotFound(f"no exec session {request.exec}")
            session.resize(request.width, request.height)
        elif request.container is not None:
            self._running(request.container).resize(request.width, request.height)
        else:
            raise InvalidArgument("resize: there is neither a container nor an exec session")
        call.answer()

    def _reopen_log(self, call: ShimCall, request: messages.ReopenLog) -> None:
        self._running(request.container).reopen_log()
        call.answer()

    def _forget(self, call: ShimCall, request: messages.Forget) -> None:
        container = self._containers.get(request.container)
        if container and not container.exit:
            raise WrongState(f"container {container.id} is still running")
        if container and container.id in self._folder_uses.values():
            self._waiting.append(call)
            return
        if container:
            del self._containers[container.id]
            container.release()
        call.answer()

    # -- exec sessions

    def _exec(self, call: ShimCall, request: messages.StartExec) -> None:
        container, exec_id, tty = self._running(request.container), request.exec, request.tty
        if exec_id in self._execs:
            raise AlreadyExists(f"exec session {exec_id} has been started already")
        forked = self._starter.exec_needs_fork(request, container)
        streams = ProcessPipes(**{n: getattr(request, n) and not tty for n in messages.STREAMS})
        session = self._execs[exec_id] = SupervisedExec(exec_id, container, call.connection)
        only_output = request.stdout and request.stderr and not (request.stdin or tty)

        def done(started: StartedProcess) -> None:
            try:
                answer = ExecAnswer(self.loop, call, started, streams)
            except OSError as error:
                started.discard()
                failed(error)
                return
            streams.close_theirs()
            session.started(started)
            if session.killed:
                self._kill_session(session)
            answer.send_within(request.exit_within_ms if only_output else 0)
            self._reaper.expect(
                started.pid, lambda ended: self._exec_exited(session, answer, ended)
            )

        def failed(error: Exception) -> None:
            streams.close()
            self._drop_exec(session)
            call.fail(error)

        steps = self._starter.execute(request, container, streams.stdio)
        session.starting = self._start(steps, done, failed, forked=forked)

    def _exec_exited(self, session: SupervisedExec, answer: ExecAnswer, ended: ProcessEnd) -> None:
        session.ended()
        code = messages.UNKNOWN_CODE if ended.exit_code is None else ended.exit_code
        if answer.send_exit(code):
            self._drop_exec(session)
            return
        self.loop.after(ENDED_EXEC_S, lambda: self._drop_exec(session))
        self._server.event(messages.ExecExited(session.id, session.container.id, code))

    def _drop_exec(self, session: SupervisedExec) -> None:
        if self._execs.get(session.id) is session:
            del self._execs[session.id]

    def _kill_exec(self, call: ShimCall, request: messages.KillExec) -> None:
        def killed(error: Exception | None) -> None:
            if error is None:
                call.answer()
            else:
                call.fail(error)

        session = self._execs.get(request.exec)
        if session is None:
            call.answer()
        else:
            self.loop.spread(session.kill(), killed)

    def _kill_execs_of(self, connection: ClientConnection) -> None:
        """Kill the exec sessions of a client that has disconnected."""
        for session in list(self._execs.values()):
            if session.owner is connection:
                self._kill_session(session)

    def _kill_session(self, session: SupervisedExec) -> None:
        def killed(error: Exception | None) -> None:
            if error is not None:
                warn(f"cannot kill exec session {session.id}: {error}")

        self.loop.spread(session.kill(), killed)

    # -- the whole

    def _start(
        self,
        steps: Generator[int, None, StartedProcess],
        done: Callable[[StartedProcess], None],
        failed: Callable[[Exception], None],
        *,
        forked: bool,
    ) -> Worker | LaunchSteps | None:
        """Carry out a launch, and call `done` or `failed`, now or later. `forked`: run the steps in
        a forked process, because they may block. Return the object that can kill the launch; None
        if the fork has failed."""
        if not forked:
            return LaunchSteps(self.loop, self._reaper, steps, done, failed)
        try:
            return self._in_worker(
                lambda: _outcome(drive(steps)),
                lambda message, fds: done(StartedProcess.of(ForkedProcess.of(message), fds)),
                failed,
            )
        except OSError as error:  # too many processes or open descriptors
            failed(error)
            return None

    def _in_worker(
        self,
        work: Callable[[], tuple[Message, list[int]]],
        done: Callable[[Message, list[int]], None],
        failed: Callable[[Exception], None],
    ) -> Worker:
        return Worker(self.loop, self._reaper, self._pods.descriptors(), work, done, failed)

    def _in_background(
        self, work: Callable[[], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        """Run `work` in a forked process, then call `on_end` with its error, or with None."""

        def run() -> tuple[Message, list[int]]:
            work()
            return {}, []

        try:
            self._in_worker(run, lambda fields, fds: on_end(None), on_end)
        except OSError as error:  # too many processes or open descriptors
            on_end(error)

    def _compile(
        self,
        compiler: LaunchCompiler[Compiled],
        on_compiled: Callable[[Compiled], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        """Compile a process, and call `on_compiled` or `on_failed`, now or later. If
        `compiler.fork_first` returns a function, a forked process first runs this function. If
        `compile` then fails, closes the function's descriptors and removes its cgroup."""

        def compile(prepared: Prepared | None) -> None:
            try:
                compiled = compiler.compile(prepared)
            except Exception as error:
                self._take_back(prepared)
                on_failed(error)
            else:
                on_compiled(compiled)

        try:
            first = compiler.fork_first()
            if first is not None:
                self._in_worker(first, lambda *result: compile(result), on_failed)
        except Exception as error:
            on_failed(error)
        else:
            if first is None:
                compile(None)

    def _state(self, call: ShimCall, request: messages.GetState) -> None:
        state, pause = None, self._pause
        if pause is not None:
            state = messages.PauseState(
                pause.pid, pause.start_time, self._pause_running, pause.netns_path()
            )
        call.answer(
            messages.PodState(
                protocol=messages.PROTOCOL,
                pid=os.getpid(),
                holder=state,
                netns_path=self.netns_path(),
                containers=[container.state() for container in self._containers.values()],
                execs=[session.id for session in self._execs.values() if not session.exited],
            )
        )

    def _shutdown(self, call: ShimCall, request: messages.Shutdown) -> None:
        running = [container.id for container in self._containers.values() if not container.exit]
        if running or self._pause_running or self._pause_starting:
            raise WrongState(
                f"still running in this pod: {', '.join(running) or 'its pause process'}"
            )
        if self._folder_uses:
            self._waiting.append(call)
            return
        call.answer()
        self._end_when_done(tries=END_TRIES)

    def _end_when_done(self, tries: int) -> None:
        """Stop serving the pod when the shim's forks have ended, for example a fork that runs a
        poststop hook or removes a systemd scope. After `tries` more checks, stop in any case."""
        if self._reaper.busy and tries:
            self.loop.after(END_RETRY_S, lambda: self._end_when_done(tries - 1))
        else:
            self._end()

    def _remove(self, group: Cgroup, tries: int = GROUP_TRIES) -> None:
        """Remove a cgroup whose processes were killed. Tries again as long as some processes are
        not dead yet."""
        if group.driver == "systemd":  # whose answer over D-Bus may take long
            self._in_background(group.remove, _warn_of)
            return
        try:
            group.remove(0)
        except WrongState as error:
            if tries:
                self.loop.after(GROUP_RETRY_S, lambda: self._remove(group, tries - 1))
            else:
                warn(str(error))
        except (Error, OSError) as error:
            warn(f"cannot remove cgroup {group.path}: {error}")

    def _end_if_abandoned(self) -> None:
        """Stop serving the pod if it has neither processes nor a connected client. This happens
        if the server dies after `TakePod`. Called once, `ABANDONED_AFTER_S` after that request."""
        if not (
            self._pause or self._pause_starting or self._containers or self._server.connections
        ):
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._pods.remove(self)

    def _container(self, container_id: str) -> SupervisedContainer:
        container = self._containers.get(container_id)
        if container is None:
            raise NotFound(f"no container {container_id} in this pod's shim")
        return container

    def _running(self, container_id: str) -> SupervisedContainer:
        container = self._container(container_id)
        if not container.running:
            raise WrongState(f"container {container.id} is not running")
        return container


def _outcome(process: StartedProcess) -> tuple[Message, list[int]]:
    """Return the message and descriptors that a fork sends to the shim about the process it has
    started."""
    started, fds = process.record()
    return started.to_fields(), fds


def _record(container: SupervisedContainer, state: State, streams: ProcessPipes) -> None:
    """Write the container's state.json. `pyrunc` reads it, and so does a restarted server that
    finds no shim."""
    try:
        state.save(
            pid=container.pid,
            start_time=container.start_time,
            started_at_ns=container.started_at_ns,
            cgroup=container.group.record(),
            streams=[stream_name(number) for number in streams.stdio],
        )
    except OSError as error:
        warn(f"container {container.id}: cannot write {messages.STATE_RECORD}: {error}")


def _checked(number: int) -> int:
    if not 0 < number < signal.NSIG:
        raise InvalidArgument(f"{number} is not a signal")
    return number


def _warn_of(error: Exception | None) -> None:
    if error is not None:
        warn(str(error))
