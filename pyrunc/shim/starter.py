"""The shim's door to the runtime library: carry out the launches that the server has had compiled.

The caller becomes the parent of what is started. All is done in steps, between other work; what waits for others on its way
(hooks, a seccomp agent) is for a fork to do, see `pod`. What comes back from there is a record and descriptors.
"""

from __future__ import annotations

import os
import sys
import time
from _signal import pidfd_send_signal  # type: ignore[import-not-found]  # (signal brings enum)

from pyrunc import atomic_file, ipc, jsontext
from pyrunc.cgroups.group import Cgroup
from pyrunc.compiler.messages import OtherRuntime
from pyrunc.errors import VISIBLE, InvalidArgument, InvalidSpec, KernelError
from pyrunc.kernel.namespace import open_namespace
from pyrunc.launch import pinned
from pyrunc.launch.enter import entering
from pyrunc.launch.run import first_process_steps
from pyrunc.launch.sealed import OpenedLaunch, cgroup_of, kinds_of_steps
from pyrunc.parts import CLOCK_MONOTONIC_RAW, STAGES, of_launch
from pyrunc.records import Record
from pyrunc.shim import messages
from pyrunc.undo import Undo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from typing import Any, Protocol

    from pyrunc.compiler.messages import CompiledContainer, CompiledExec, CompiledPause
    from pyrunc.launch.model import Launch
    from pyrunc.launch.run import ChildProcess, Times
    from pyrunc.parts import Part
    from pyrunc.shim.session import Container
    from pyrunc.spec.model import Spec

    class Starter(Protocol):
        """What the shim needs somebody to start for it. The records are a compiler's answers (`compiler.messages`); their descriptors
        belong to the starter from the first step on."""

        def holder(
            self, compiled: CompiledPause, fds: Sequence[int], network: int | None
        ) -> Generator[int, None, Holder]: ...

        def container(
            self,
            compiled: CompiledContainer,
            fds: Sequence[int],
            directory: str,
            stdio: tuple[int, int, int],
            holder: Holder | None,
        ) -> Generator[int, None, Process]: ...

        def execute(
            self,
            compiled: CompiledExec,
            fds: Sequence[int],
            container: Container,
            stdio: tuple[int, int, int],
            tty: bool,
        ) -> Generator[int, None, Process]: ...

        def waits(self, compiled: CompiledContainer) -> bool: ...

        def group(self, compiled: CompiledContainer | CompiledPause) -> Cgroup | None: ...

        def after_stop(self, container_id: str, directory: str) -> None: ...

        def send_signal(self, directory: str, number: int) -> None: ...


WAITING_STEPS = frozenset(("RunHooks", "SendListener", "EnterRdt", "JoinRdt", "MoveLinks"))
"""Steps of a parent that wait for somebody else, or may take long."""


class OfPod:
    """A process that we wait for: our child, which is not reaped, so the number is its own; or, with a `pidfd`, one whose shim was
    lost."""

    __slots__ = ("pid", "pidfd", "start_time")

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid, self.start_time = pid, start_time
        self.pidfd: int | None = None

    def send_signal(self, number: int) -> None:
        """Fine when it has ended."""
        if self.pidfd is None:
            os.kill(self.pid, number)
            return
        try:
            pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            pass

    def open_pidfd(self) -> int:
        """The caller's to close."""
        return os.pidfd_open(self.pid) if self.pidfd is None else os.dup(self.pidfd)

    def close_pidfd(self) -> None:
        """It has ended."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class StartedProcess(Record):
    """What a fork says of a `Process` that it has started, which goes with its terminal's master, if it has one."""

    pid: int
    start_time: int
    group: dict[str, str]
    poststop: bool
    other: bool
    parts: Sequence[Any]


class Process(OfPod):
    """A process that was started. `console_fd`, a pty's master, belongs to whoever gets this. `parts`: where the time of its start
    went."""

    __slots__ = ("console_fd", "group", "has_poststop", "of_other_runtime", "parts")

    def __init__(self, pid: int, start_time: int, group: Cgroup, console_fd: int | None = None) -> None:
        super().__init__(pid, start_time)
        self.group, self.console_fd = group, console_fd
        self.has_poststop = self.of_other_runtime = False
        self.parts: list[Part] = []

    def record(self) -> tuple[StartedProcess, list[int]]:
        """For the other side's `of`."""
        group = self.group.record()
        started = StartedProcess(
            self.pid, self.start_time, group, self.has_poststop, self.of_other_runtime, self.parts
        )
        return started, [] if self.console_fd is None else [self.console_fd]

    @classmethod
    def of(cls, started: StartedProcess, fds: list[int]) -> Process:
        """The process that `record` described; owns the descriptors."""
        console_fd = fds[0] if fds else None
        found = cls(started.pid, started.start_time, Cgroup.from_record(started.group), console_fd)
        found.has_poststop, found.of_other_runtime = started.poststop, started.other
        found.parts = [*started.parts]
        return found


class Holder(OfPod):
    """The pod's pause process and what the shim pins for the pod: the network namespace and detached mounts, by name."""

    __slots__ = ("group", "mounts", "netns_fd", "parts")

    def __init__(
        self, pid: int, start_time: int, netns_fd: int | None, mounts: dict[str, int], group: Cgroup | None
    ) -> None:
        super().__init__(pid, start_time)
        self.netns_fd, self.mounts, self.group = netns_fd, mounts, group
        self.parts: list[Part] = []

    def record(self) -> tuple[messages.KeptHolder, list[int]]:
        """For the other side's `of`."""
        group = self.group.record() if self.group else None
        network = self.netns_fd is not None
        kept = messages.KeptHolder(self.pid, self.start_time, group, network, list(self.mounts))
        return kept, [*([] if self.netns_fd is None else [self.netns_fd]), *self.mounts.values()]

    @classmethod
    def of(cls, kept: messages.KeptHolder, fds: list[int]) -> Holder:
        """The holder that `record` described; owns the descriptors. Raises ValueError: not its descriptors."""
        netns_fd = fds.pop(0) if kept.network else None
        mounts = dict(zip(kept.mounts, fds, strict=True))
        group = kept.group and Cgroup.from_record(kept.group)
        return cls(kept.pid, kept.start_time, netns_fd, mounts, group or None)

    def netns_path(self) -> str | None:
        """Of the network namespace, as long as this process lives."""
        return None if self.netns_fd is None else f"/proc/{os.getpid()}/fd/{self.netns_fd}"

    def ended(self) -> None:
        """The holder has exited: the mounts go, the network namespace stays for the teardown of the network."""
        for fd in self.mounts.values():
            os.close(fd)
        self.mounts = {}


class LibraryStarter:
    """Starts by the runtime library."""

    def holder(
        self, compiled: CompiledPause, fds: Sequence[int], network: int | None
    ) -> Generator[int, None, Holder]:
        """The pod's pause process, its pinned mounts (the last descriptors), its network namespace: `network`, which stays the
        caller's, or one that is made with the process. Raises Error."""
        first_pin = len(fds) - len(compiled.pins)
        mounts = dict(zip(compiled.pins, fds[first_pin:], strict=True))
        with Undo() as undo:
            undo.push("pinned mounts", ipc.close_all, list(mounts.values()))
            opened = OpenedLaunch(compiled.launch, fds[:first_pin])
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            try:
                launch = opened.launch.replace(stdio=(null, null, null))
                if launch.pinned:
                    assert network is not None
                    pins = dict.fromkeys(launch.pinned, network)
                    launch = launch.replace(descriptors={**launch.descriptors, **pins})
                clock = _Clock(launch)
                child = yield from first_process_steps(launch, undo, times=clock.times)
                clock.stop()
            finally:
                os.close(null)
                opened.close()
            os.close(child.pidfd)
            _warn(compiled.warnings)
            netns_fd = network
            if compiled.network == "new":
                netns_fd = open_namespace(f"/proc/{child.pid}/ns/net", "net")
            undo.commit()
        holder = Holder(child.pid, child.start_time, netns_fd, mounts, launch.cgroup)
        holder.parts = clock.parts
        return holder

    def container(
        self,
        compiled: CompiledContainer,
        fds: Sequence[int],
        directory: str,
        stdio: tuple[int, int, int],
        holder: Holder | None,
    ) -> Generator[int, None, Process]:
        """The container's first process. Raises Error."""
        if compiled.runtime is not None:
            from pyrunc.shim import other_runtime

            return other_runtime.start(compiled, fds, directory, stdio, holder)
        if compiled.restore is not None:
            from pyrunc.shim import restored

            return restored.start(compiled, fds, directory, stdio, holder)
        opened = OpenedLaunch(compiled.launch or {}, fds)
        clones: dict[str, int] = {}
        try:
            launch = opened.launch
            clock = _Clock(launch)
            _clone_pinned(launch, holder, clones)
            launch = launch.replace(stdio=stdio, descriptors={**launch.descriptors, **clones})
            with Undo() as undo:
                child = yield from first_process_steps(launch, undo, times=clock.times)
                clock.stop()
                undo.commit()
        finally:
            ipc.close_all(list(clones.values()))
            opened.close()
        os.close(child.pidfd)
        _warn(compiled.warnings)
        assert launch.cgroup is not None
        if compiled.poststart:
            _run_poststart(compiled.poststart, launch, child)
        process = Process(child.pid, child.start_time, launch.cgroup, child.console_fd)
        process.has_poststop, process.parts = compiled.poststop, clock.parts
        return process

    def execute(
        self,
        compiled: CompiledExec,
        fds: Sequence[int],
        container: Container,
        stdio: tuple[int, int, int],
        tty: bool,
    ) -> Generator[int, None, Process]:
        """Another process in a container that runs. Raises Error."""
        if compiled.runtime is not None:
            from pyrunc.shim import other_runtime

            return other_runtime.execute(compiled, container, stdio, tty)
        opened = OpenedLaunch(compiled.launch or {}, fds)
        try:
            pidfd = container.open_pidfd()
            try:
                launch = opened.launch
                if launch.container_pid != container.pid:
                    raise InvalidArgument(
                        f"exec: process {launch.container_pid} is not container {container.id}'s"
                    )
                launch = launch.replace(stdio=stdio, descriptors={**launch.descriptors, "container": pidfd})
                clock = _Clock(launch)
                with Undo() as undo:
                    child, _ = yield from entering(launch, undo, clock.times)
                    clock.stop()
                    undo.commit()
            finally:
                os.close(pidfd)
        finally:
            opened.close()
        os.close(child.pidfd)
        _warn(compiled.warnings)
        process = Process(child.pid, child.start_time, container.group, child.console_fd)
        process.parts = clock.parts
        return process

    def waits(self, compiled: CompiledContainer) -> bool:
        """Whether the parent waits for somebody else while it carries the launch out, so that a fork should do it."""
        if compiled.launch is None:
            return True
        return bool(compiled.poststart) or not WAITING_STEPS.isdisjoint(kinds_of_steps(compiled.launch))

    def group(self, compiled: CompiledContainer | CompiledPause) -> Cgroup | None:
        """Where the process lives or would have lived."""
        if compiled.launch is not None:
            return cgroup_of(compiled.launch)
        record = getattr(compiled, "cgroup", None)
        return Cgroup.from_record(record) if record else None

    def after_stop(self, container_id: str, directory: str) -> None:
        """What resctrl has of a container that has exited, and its poststop hooks; what fails is reported on stderr (runtime-spec).
        Of another runtime's container all that it keeps of it."""
        if (runtime := _other_runtime(directory)) is not None:
            from pyrunc.shim import other_runtime

            other_runtime.delete(runtime, directory)
            return
        from pyrunc.container import status
        from pyrunc.container.state import State
        from pyrunc.launch import hooks
        from pyrunc.spec.parse import parse

        with open(f"{directory}/{messages.CONFIG}", "rb", buffering=0) as file:
            spec = parse(jsontext.loads(file.readall() or b""))
        _leave_caches(spec, container_id)
        state = State(
            directory,
            container_id,
            bundle=directory,
            oci_version=spec.version,
            annotations=dict(spec.annotations),
        )
        _warn(hooks.run_all(spec.hooks.poststop, "poststop", status.oci_state(state, status.STOPPED)))

    def send_signal(self, directory: str, number: int) -> None:
        """Through the other runtime that runs the container. Raises Error."""
        from pyrunc.shim import other_runtime

        runtime = _other_runtime(directory)
        assert runtime is not None
        other_runtime.send_signal(runtime, directory, number)


def _other_runtime(directory: str) -> OtherRuntime | None:
    """What launch.json says of the runtime; None for a container of ours."""
    return OtherRuntime.in_launch(atomic_file.read_json(f"{directory}/{messages.LAUNCH}"))


class _Clock:
    """Where the time of a launch goes."""

    __slots__ = ("_launch", "_started_ns", "parts", "times")

    def __init__(self, launch: Launch) -> None:
        self._launch, self._started_ns = launch, time.clock_gettime_ns(CLOCK_MONOTONIC_RAW)
        self.times: Times = []
        self.parts: list[Part] = []

    def stop(self) -> None:
        """It is carried out, and its program still open: that has the words for what was timed."""
        texts = {}
        if len(self.times) > len(STAGES):
            texts = {str(line.number): line.text for line in self._launch.lowered.program.lines}
        self.parts = of_launch(self._started_ns, self.times, texts)


def _clone_pinned(launch: Launch, holder: Holder | None, clones: dict[str, int]) -> None:
    """What the pod pins, by the names that the launch's program has for it. Raises InvalidSpec, KernelError."""
    for descriptor, name in launch.pinned.items():
        if holder is None or name not in holder.mounts:
            raise InvalidSpec("mounts", f"there is no mount called {name!r} in this pod")
        clones[descriptor] = pinned.clone(holder.mounts[name], f"/proc/{holder.pid}/ns/mnt")


def _run_poststart(found: Sequence[Any], launch: Launch, child: ChildProcess) -> None:
    from pyrunc.launch import hooks
    from pyrunc.launch.sealed import value_of
    from pyrunc.launch.steps import oci_state

    told = oci_state(launch, child.pid, "running")
    _warn(hooks.run_all(tuple(map(value_of, found)), "poststart", told))


def _leave_caches(spec: Spec, container_id: str) -> None:
    if not spec.linux.intel_rdt:
        return
    from pyrunc.launch.rdt import leave_mounted

    try:
        leave_mounted(spec.linux.intel_rdt, container_id)
    except KernelError as error:
        _warn([error.message])


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"pyrunc-shim: {warning.translate(VISIBLE)}", file=sys.stderr)
