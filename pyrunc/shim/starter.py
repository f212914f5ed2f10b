"""Compiles and starts pause processes, containers and execs for the shim.

The shim becomes the parent of the started processes. Starts are generators that run in steps
between other work. A start that waits for other processes (hooks, a seccomp agent) runs in a fork
(`worker`), which describes the started process in a `ForkedProcess` message.
"""

from __future__ import annotations

import os
import signal
import time

from pyrunc import jsontext
from pyrunc.cgroups.group import Cgroup
from pyrunc.container import status
from pyrunc.container.state import State
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError
from pyrunc.kernel.fd import close_all, closing_fd, duplicates, read_file
from pyrunc.kernel.namespace import open_namespace
from pyrunc.kernel.process import send_signal
from pyrunc.launch import hooks, pinned, rdt
from pyrunc.launch.enter import enter_steps
from pyrunc.launch.run import first_process_steps
from pyrunc.launch.steps import oci_state
from pyrunc.records import Record
from pyrunc.shim import compile, messages
from pyrunc.shim.compile import ContainerCompiler, PauseCompiler
from pyrunc.shim.files import LaunchFile
from pyrunc.shim.warn import warn
from pyrunc.spec.parse import parse
from pyrunc.timings import STAGES, of_launch
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any

    from pyrunc.launch.model import Launch
    from pyrunc.launch.run import Times
    from pyrunc.shim.compile import CompiledContainer, CompiledPause
    from pyrunc.shim.files import OtherRuntime
    from pyrunc.shim.session import SupervisedContainer
    from pyrunc.spec.model import Spec
    from pyrunc.timings import Part

WAITING_STEPS = frozenset(("RunHooks", "SendListener", "EnterRdt", "JoinRdt", "MoveLinks"))
"""Classes of `ParentStep` that wait for other processes, or may take long."""


class SupervisedProcess:
    """A process that the shim supervises: its child, or a process that an earlier shim has started.
    `pidfd`: None for a child, because its pid is not reused before the shim reaps it."""

    __slots__ = ("pid", "pidfd", "start_time")

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid, self.start_time = pid, start_time
        self.pidfd: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing when the process has ended."""
        if self.pidfd is None:
            # Our child, whose pid is not reused before it is reaped.
            os.kill(self.pid, number)
        else:
            send_signal(self.pidfd, number)

    def open_pidfd(self) -> int:
        """Return a new pidfd, which the caller closes."""
        return os.pidfd_open(self.pid) if self.pidfd is None else os.dup(self.pidfd)

    def discard(self) -> None:
        """Kill the process, because a later step of its start has failed. Close its descriptors."""
        self.send_signal(signal.SIGKILL)
        self.close_pidfd()

    def close_pidfd(self) -> None:
        """Close the pidfd after the exit."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class ForkedProcess(Record):
    """The message in which a fork of the shim describes the process that the fork has started
    (`StartedProcess.record`). Its descriptor is the terminal's master, if there is a terminal."""

    pid: int
    start_time: int
    group: dict[str, str]
    poststop: bool
    other: bool
    parts: Sequence[Any]


class StartedProcess(SupervisedProcess):
    """A started process of a container: its first process, or the process of an exec.

    - `console_fd`: a pty's master, which the owner of this object closes
    - `parts`: the stages of the start with their times (`Timings.noted`)
    """

    __slots__ = ("console_fd", "group", "has_poststop", "of_other_runtime", "parts")

    def __init__(
        self, pid: int, start_time: int, group: Cgroup, console_fd: int | None = None
    ) -> None:
        super().__init__(pid, start_time)
        self.group, self.console_fd = group, console_fd
        self.has_poststop = self.of_other_runtime = False
        self.parts: list[Part] = []

    def discard(self) -> None:
        super().discard()
        if self.console_fd is not None:
            os.close(self.console_fd)

    def record(self) -> tuple[ForkedProcess, list[int]]:
        """Return the message and the descriptors that a fork of the shim sends to the shim about
        this process. `of` reads them."""
        group = self.group.record()
        started = ForkedProcess(
            self.pid, self.start_time, group, self.has_poststop, self.of_other_runtime, self.parts
        )
        return started, [] if self.console_fd is None else [self.console_fd]

    @classmethod
    def of(cls, started: ForkedProcess, fds: list[int]) -> StartedProcess:
        """Return the process that a fork has described by `record`. The result owns the
        descriptors."""
        console_fd = fds[0] if fds else None
        process = cls(
            started.pid, started.start_time, Cgroup.from_record(started.group), console_fd
        )
        process.has_poststop, process.of_other_runtime = started.poststop, started.other
        process.parts = [*started.parts]
        return process

    @classmethod
    def from_stored(cls, record: messages.StoredContainer, fds: Sequence[int]) -> StartedProcess:
        """Return the first process of the container that `record` and `fds`, stored in the keeper,
        describe. The result owns the descriptors. Raises InvalidArgument; the caller then still
        owns the descriptors."""
        if len(fds) != 1 + len(record.outputs):
            raise InvalidArgument(
                f"the keeper's entry for a container has {len(fds)} descriptors, not"
                f" {1 + len(record.outputs)}"
            )
        console_fd = fds[1] if record.terminal and record.outputs else None
        process = cls(record.pid, record.start_time, Cgroup.from_record(record.group), console_fd)
        process.has_poststop, process.of_other_runtime = record.poststop, record.other
        process.pidfd = fds[0]
        return process


class PauseProcess(SupervisedProcess):
    """The pod's pause process, with the network namespace and the detached mounts (by name) that
    the shim pins for the pod."""

    __slots__ = ("group", "mounts", "netns_fd", "parts")

    def __init__(
        self,
        pid: int,
        start_time: int,
        netns_fd: int | None,
        mounts: dict[str, int],
        group: Cgroup | None,
    ) -> None:
        super().__init__(pid, start_time)
        self.netns_fd, self.mounts, self.group = netns_fd, mounts, group
        self.parts: list[Part] = []

    def store(self) -> tuple[messages.StoredPause, list[int]]:
        """Return the data and the descriptors that the keeper is to store for the pause process.
        The descriptors are copies, which the caller closes."""
        group = self.group.record() if self.group else None
        network = [] if self.netns_fd is None else [self.netns_fd]
        fds = [*network, *self.mounts.values()]
        record = messages.StoredPause(
            self.pid, self.start_time, group, bool(network), list(self.mounts)
        )
        with closing_fd(self.open_pidfd()) as pidfd:
            return record, duplicates([pidfd, *fds])

    @classmethod
    def from_stored(cls, record: messages.StoredPause, fds: Sequence[int]) -> PauseProcess:
        """Return the pause process that `record` and `fds`, stored in the keeper, describe. The
        result owns the descriptors. Raises InvalidArgument, and then closes the descriptors."""
        if len(fds) != 1 + record.network + len(record.mounts):
            close_all(fds)
            raise InvalidArgument(
                f"the keeper's entry for a pause process has {len(fds)} descriptors for"
                f" {len(record.mounts)} mounts"
            )
        group = Cgroup.from_record(record.group) if record.group else None
        netns_fd = fds[1] if record.network else None
        mounts = dict(zip(record.mounts, fds[1 + record.network :], strict=True))
        pause = cls(record.pid, record.start_time, netns_fd, mounts, group)
        pause.pidfd = fds[0]
        return pause

    def netns_path(self) -> str | None:
        """Return the path of the network namespace, valid as long as the shim lives. None if the
        shim does not pin it."""
        return None if self.netns_fd is None else f"/proc/{os.getpid()}/fd/{self.netns_fd}"

    def ended(self) -> None:
        """Close the mounts after the exit. The network namespace stays open until the pod's network
        is removed."""
        close_all(self.mounts.values())
        self.mounts = {}


class Starter:
    """Compiles and starts pause processes, containers and execs."""

    def __init__(self, oom_score_adj: int) -> None:
        """Prepare to start processes. `oom_score_adj`: the value for processes whose configuration
        sets none."""
        self._oom_score_adj = oom_score_adj

    def container_compiler(
        self, directory: str, request: messages.CreateContainer, fds: Sequence[int]
    ) -> ContainerCompiler:
        """Return the object that compiles the container of `request` from the files in
        `directory`. Raises Error, OSError."""
        return ContainerCompiler(directory, request, fds, self._oom_score_adj)

    def pause_compiler(self, sandbox_dir: str, *, timed: bool) -> PauseCompiler:
        """Return the object that compiles the pause process from pause.json in `sandbox_dir`.
        `timed`: the launch reports when each operation is done. Raises Error, OSError."""
        return PauseCompiler(sandbox_dir, timed=timed)

    def pause(
        self, compiled: CompiledPause, network: int | None
    ) -> Generator[int, None, PauseProcess]:
        """Start the pod's pause process. Raises Error.

        `network`: the pod's network namespace, which the caller closes. None if the clone call that
        makes the process also makes the namespace, or if the pod uses the host's network.
        """
        with Undo() as undo:
            undo.push("pinned mounts", close_all, list(compiled.pins.values()))
            launch = compiled.launch
            assert launch is not None
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            try:
                launch = launch.replace(stdio=(null, null, null))
                if launch.pinned:
                    assert network is not None
                    pins = dict.fromkeys(launch.pinned, network)
                    launch = launch.replace(descriptors={**launch.descriptors, **pins})
                clock = _Clock(launch)
                child = yield from first_process_steps(launch, undo, times=clock.times)
                clock.stop()
            finally:
                os.close(null)
                compiled.close()
            os.close(child.pidfd)
            warn(*compiled.warnings)
            netns_fd = network
            if compiled.new_network:
                # The descriptor outlives the process: CNI DEL runs after the pause process has
                # ended.
                netns_fd = open_namespace(f"/proc/{child.pid}/ns/net", "net")
            undo.commit()
        pause = PauseProcess(child.pid, child.start_time, netns_fd, compiled.pins, launch.cgroup)
        compiled.parts.include(clock.parts)
        pause.parts = compiled.parts.noted
        return pause

    def container(
        self,
        compiled: CompiledContainer,
        directory: str,
        stdio: tuple[int, int, int],
        pause: PauseProcess | None,
    ) -> Generator[int, None, StartedProcess]:
        """Start the container's first process, with clones of the mounts that `pause` pins. Raises
        Error."""
        if compiled.file.runtime is not None:
            from pyrunc.shim import other_runtime

            return other_runtime.start(compiled, directory, stdio, pause)
        if compiled.file.restore is not None:
            from pyrunc.shim import restored

            return restored.start(compiled, directory, stdio, pause)
        launch = compiled.launch
        assert launch is not None and launch.cgroup is not None
        clones: dict[str, int] = {}
        try:
            clock = _Clock(launch)
            _clone_pinned(launch, pause, clones)
            launch = launch.replace(stdio=stdio, descriptors={**launch.descriptors, **clones})
            with Undo() as undo:
                child = yield from first_process_steps(launch, undo, times=clock.times)
                clock.stop()
                undo.commit()
        finally:
            close_all(clones.values())
            compiled.close()
        os.close(child.pidfd)
        warn(*compiled.warnings)
        if compiled.poststart:
            state = oci_state(launch, child.pid, "running")
            warn(*hooks.run_all(compiled.poststart, "poststart", state))
        assert launch.cgroup is not None
        process = StartedProcess(child.pid, child.start_time, launch.cgroup, child.console_fd)
        process.has_poststop, process.parts = compiled.poststop, clock.parts
        return process

    def execute(
        self,
        request: messages.StartExec,
        container: SupervisedContainer,
        stdio: tuple[int, int, int],
    ) -> Generator[int, None, StartedProcess]:
        """Start another process in a running container. Raises Error."""
        if container.of_other_runtime:
            from pyrunc.shim import other_runtime

            return other_runtime.execute(
                _runtime_of(container.directory), request, container, stdio
            )
        with closing_fd(container.open_pidfd()) as pidfd:
            compiled = compile.compile_exec_request(
                container, request, pidfd, stdio, self._oom_score_adj
            )
        try:
            assert compiled.launch is not None
            launch = compiled.launch
            clock = _Clock(launch)
            with Undo() as undo:
                child, _ = yield from enter_steps(launch, undo, clock.times)
                clock.stop()
                undo.commit()
        finally:
            compiled.close()
        os.close(child.pidfd)
        warn(*compiled.warnings)
        process = StartedProcess(child.pid, child.start_time, container.group, child.console_fd)
        compiled.parts.include(clock.parts)
        process.parts = compiled.parts.noted
        return process

    def needs_fork(self, compiled: CompiledContainer) -> bool:
        """Return whether a container's start must run in a fork, because it waits for other
        processes, such as hooks or a seccomp agent."""
        launch = compiled.launch
        if launch is None or compiled.poststart:
            return True
        return any(
            type(step).__name__ in WAITING_STEPS
            for steps in launch.lowered.steps.values()
            for step in steps
        )

    def exec_needs_fork(self, request: messages.StartExec, container: SupervisedContainer) -> bool:
        """Return whether the start of an exec must run in a fork, because it waits for another OCI
        runtime, or reads a file of the container. Raises Error, OSError."""
        return container.of_other_runtime or compile.looks_up_home(
            container, request, self._oom_score_adj
        )

    def after_stop(self, container_id: str, directory: str) -> None:
        """Clean up after a container's exit: remove its resctrl groups and run its poststop hooks.
        Failures of hooks are reported on stderr (runtime-spec). For a container of another OCI
        runtime, run that runtime's `delete` instead."""
        if (runtime := LaunchFile.read(directory).other_runtime) is not None:
            from pyrunc.shim.other_runtime import RuntimeCommand

            RuntimeCommand(runtime, directory).delete()
            return
        spec = parse(jsontext.loads(read_file(f"{directory}/{messages.CONFIG}")))
        _leave_caches(spec, container_id)
        state = State.of_spec(container_id, directory, directory, spec)
        final_state = status.oci_state(state, status.STOPPED)
        warn(*hooks.run_all(spec.hooks.poststop, "poststop", final_state))

    def send_signal(self, directory: str, number: int) -> None:
        """Send a signal to the container of another OCI runtime, by that runtime's `kill`. Raises
        Error."""
        from pyrunc.shim.other_runtime import RuntimeCommand

        RuntimeCommand(_runtime_of(directory), directory).kill(number)


def _runtime_of(directory: str) -> OtherRuntime:
    """Return the OCI runtime other than pyrunc that runs the container."""
    runtime = LaunchFile.read(directory).other_runtime
    assert runtime is not None
    return runtime


class _Clock:
    """Measures how long a launch and its stages take."""

    __slots__ = ("_launch", "_started_ns", "parts", "times")

    def __init__(self, launch: Launch) -> None:
        self._launch, self._started_ns = launch, time.time_ns()
        self.times: Times = []
        self.parts: list[Part] = []

    def stop(self) -> None:
        """Set `parts` to the begin and end of each stage, from the `times` that the launch has
        measured. A timed launch also gets the begin and end of each line of the plan."""
        texts = {}
        if len(self.times) > len(STAGES):
            texts = {str(line.number): line.text for line in self._launch.lowered.program.lines}
        self.parts = of_launch(self._started_ns, self.times, texts)


def _clone_pinned(launch: Launch, pause: PauseProcess | None, clones: dict[str, int]) -> None:
    """Clone those mounts of `pause` that the launch uses. Add the clones to `clones`: name of the
    descriptor in the plan -> descriptor. Raises InvalidSpec, KernelError."""
    for descriptor, name in launch.pinned.items():
        if pause is None or name not in pause.mounts:
            raise InvalidSpec("mounts", f"the pod has no mount {name!r}")
        clones[descriptor] = pinned.clone(pause.mounts[name], f"/proc/{pause.pid}/ns/mnt")


def _leave_caches(spec: Spec, container_id: str) -> None:
    if not spec.linux.intel_rdt:
        return
    try:
        rdt.leave_mounted(spec.linux.intel_rdt, container_id)
    except KernelError as error:
        warn(error.message)
