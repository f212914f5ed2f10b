"""Starts plain processes in place of the runtime library's containers, to test the shim's own work
without namespaces.

Calls and results are the same (a child of the shim, its own cgroup, a pty's master); `process.args`
run on the host. A slow start waits at `process.gate`, a named pipe, until the test opens it for
writing; at `process.blocks` a fork waits.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Generator, Sequence
from typing import Any

from pyrunc import jsontext
from pyrunc.cgroups.group import Cgroup
from pyrunc.container.state import State
from pyrunc.errors import NotFound, WrongState
from pyrunc.shim import messages, tree
from pyrunc.shim.compile import CompiledContainer, CompiledPause
from pyrunc.shim.files import LaunchFile
from pyrunc.shim.session import SupervisedContainer
from pyrunc.shim.starter import PauseProcess, StartedProcess, Starter
from pyrunc.timings import Timings

STORED_FD = 1000


class Direct(CompiledContainer):
    """A container whose `process` is run on the host."""

    process: dict[str, Any]


class DirectPause(CompiledPause):
    """A pause process; `fields` are those of pause.json."""

    fields: dict[str, Any]

    @property
    def cgroup(self) -> Cgroup:
        return Cgroup(self.fields["cgroups_path"])


class DirectCompiler:
    """Reads config.json and launch.json as the runtime library does."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        try:
            self._config = _read(f"{directory}/config.json")
        except FileNotFoundError:
            raise NotFound(f"no record of {os.path.basename(directory)}") from None

    def fork_first(self) -> Any:
        """If `process.first` is set, return the function that a fork of the shim must run first: it
        makes a cgroup and opens a pipe's writing end. `compile` then refuses the container."""
        if "first" not in self._config["process"]:
            return None
        group = Cgroup(self._config["linux"]["cgroupsPath"])

        def work() -> tuple[dict[str, Any], list[int]]:
            group.create()
            return {"cgroup": group.record()}, [os.pipe2(os.O_CLOEXEC)[1]]

        return work

    def compile(self, prepared: Any) -> CompiledContainer:
        config = self._config
        if prepared is not None:
            raise WrongState(config["process"]["first"])
        file = LaunchFile.of({"rootfs": {}, **_read(f"{self._directory}/launch.json")})
        direct = Direct(None, (), (), Timings())
        direct.file = file
        direct.state = State(os.path.basename(self._directory), self._directory, complete=True)
        direct.process, direct.group = config["process"], Cgroup(config["linux"]["cgroupsPath"])
        return direct


class DirectPauseCompiler:
    def __init__(self, sandbox_dir: str) -> None:
        self._sandbox_dir = sandbox_dir

    def fork_first(self) -> None:
        return None

    def compile(self, prepared: Any) -> CompiledPause:
        pause = DirectPause(None, (), (), Timings())
        pause.pins = {}
        pause.fields = _read(f"{self._sandbox_dir}/pause.json")
        return pause


class DirectStarter(Starter):
    """Starts plain processes."""

    def __init__(self) -> None:
        super().__init__(0)

    def container_compiler(self, directory: str, request: Any, fds: Sequence[int]) -> Any:
        return DirectCompiler(directory)

    def pause_compiler(self, sandbox_dir: str, *, timed: bool) -> Any:
        return DirectPauseCompiler(sandbox_dir)

    def pause(
        self, compiled: CompiledPause, network: int | None
    ) -> Generator[int, None, PauseProcess]:
        assert isinstance(compiled, DirectPause)
        fields, group = compiled.fields, compiled.cgroup
        group.create()
        pid = _spawn(["/bin/sleep", "1000"], {}, (0, 1, 2), None, group)
        try:
            if "gate" in fields:
                yield from _wait(fields["gate"])
            if "fails" in fields:
                raise WrongState(fields["fails"])
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return PauseProcess(
            pid, _start_time(pid), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY), {}, group
        )

    def container(
        self,
        compiled: CompiledContainer,
        directory: str,
        stdio: tuple[int, int, int],
        pause: PauseProcess | None,
    ) -> Generator[int, None, StartedProcess]:
        assert isinstance(compiled, Direct) and compiled.group is not None
        group, process = compiled.group, compiled.process
        group.create()
        if "gate" in process:
            yield from _wait(process["gate"])
        return self._start(process, stdio, compiled.file.tty, group)

    def execute(
        self,
        request: messages.StartExec,
        container: SupervisedContainer,
        stdio: tuple[int, int, int],
    ) -> Generator[int, None, StartedProcess]:
        process = request.process
        if "gate" in process:
            yield from _wait(process["gate"])
        return self._start(process, stdio, request.tty, container.group)

    def needs_fork(self, compiled: CompiledContainer) -> bool:
        assert isinstance(compiled, Direct)
        return bool(compiled.process.get("blocks"))

    def exec_needs_fork(self, request: messages.StartExec, container: SupervisedContainer) -> bool:
        return False

    def after_stop(self, container_id: str, directory: str) -> None:
        raise NotImplementedError("plain processes have no hooks")

    def _start(
        self, process: dict[str, Any], stdio: Sequence[int], tty: bool, group: Cgroup
    ) -> StartedProcess:
        args = process["args"]
        if not os.path.exists(args[0]):
            raise NotFound(f"{args[0]}: no such file or directory")
        if "blocks" in process:
            os.close(os.open(process["blocks"], os.O_RDONLY))
        master = slave = None
        if tty:
            master, slave = os.openpty()
        try:
            pid = _spawn(args, process.get("environment", {}), stdio, slave, group)
        finally:
            if slave is not None:
                os.close(slave)
        return StartedProcess(pid, _start_time(pid), group, master)


class WithoutEndShim(DirectStarter):
    """Makes the shim act as an earlier version, which does not know the call `end_shim`."""

    def __init__(self) -> None:
        super().__init__()
        messages.EndShim.call = "not known"


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        document: dict[str, Any] = jsontext.loads(file.read())
    return document


def _spawn(
    args: list[str],
    environment: dict[str, str],
    stdio: Sequence[int],
    slave: int | None,
    group: Cgroup,
) -> int:
    """Starts the process and returns after its execve, as the runtime library does: before, the
    process may be in no cgroup yet."""
    executed, executing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(executing)
        os.read(executed, 1)
        os.close(executed)
        return pid
    try:
        executing = fcntl.fcntl(executing, fcntl.F_DUPFD_CLOEXEC, STORED_FD)
        group.attach(os.getpid())
        if slave is not None:
            os.login_tty(slave)
        else:
            os.setsid()
            for place, fd in enumerate(stdio):
                os.dup2(fd, place)
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, STORED_FD)
        os.closerange(executing + 1, 65536)
        os.execve(args[0], args, {**os.environ, **environment})
    finally:
        os._exit(127)


def _wait(gate: str) -> Generator[int, None, None]:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.posix_spawn(
        "/bin/cat", ["cat", gate], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)]
    )
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _start_time(pid: int) -> int:
    fact = tree.stat(pid)
    assert fact is not None
    return fact.start_time
