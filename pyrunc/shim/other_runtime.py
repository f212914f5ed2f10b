"""Runs containers with an OCI runtime other than pyrunc, by runc's command line, which all runtimes
understand. The commands run in forks of the shim.

    create --bundle DIR --pid-file FILE [--console-socket SOCKET] ID, start ID, kill ID NUMBER,
    delete --force ID,
    exec --detach --process FILE --pid-file FILE [--console-socket SOCKET] ID

When the runtime and the fork have ended, the shim, a subreaper, becomes the parent of the
container's process and supervises it like any other. Only signals go through the runtime, because
it may run the process in a virtual machine. The fork attaches the root and the other mounts in a
new mount namespace, which the runtime inherits, so the host sees none of them. The runtime keeps
its state in the container's folder.
"""

from __future__ import annotations

import os
import signal
from _socket import (
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    SOCK_CLOEXEC,
    SOCK_STREAM,
)
from _socket import socket as _Socket

from pyrunc import atomic_file, jsontext
from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.mount import MS_SLAVE
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import Error, InvalidArgument, KernelError, NotFound, PeerError
from pyrunc.kernel import mount as kernel_mount
from pyrunc.kernel.fd import close_all, received
from pyrunc.kernel.mountinfo import mount_points
from pyrunc.kernel.namespace import unshare
from pyrunc.kernel.process import stat
from pyrunc.launch import pinned
from pyrunc.shim.messages import CONFIG
from pyrunc.shim.starter import StartedProcess
from pyrunc.shim.warn import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.ipc import Message
    from pyrunc.shim import messages
    from pyrunc.shim.compile import CompiledContainer
    from pyrunc.shim.files import OtherRuntime
    from pyrunc.shim.session import SupervisedContainer
    from pyrunc.shim.starter import PauseProcess

    Stdio = tuple[int, int, int]

STATE, LOG, PID, CONSOLE = "runtime", "runtime.log", "runtime.pid", "console.sock"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
CONSOLE_TIMEOUT_S = 10.0
LOG_READ_BYTES = 64 << 10
NO_SUCH_PROGRAM = ("executable file not found", "no such file or directory", "not found in $PATH")


class RuntimeCommand:
    """The runtime's command line for one container."""

    def __init__(self, record: OtherRuntime, directory: str) -> None:
        """Change the working directory to the container's folder `directory`, because the path of a
        socket must be short. The folder's name is the container's id."""
        os.chdir(directory)
        self.id, self._directory = os.path.basename(directory), directory
        self._binary = record.binary
        self._head = [self._binary, *record.arguments, "--root", f"{directory}/{STATE}"]
        self._head += ["--log", f"{directory}/{LOG}", "--log-format", "json"]
        self._head += ["--systemd-cgroup"] if record.systemd else []

    def create(self, stdio: Stdio, *, tty: bool) -> tuple[int, int | None]:
        """Create the container; return the pid of the process that waits for `start`, and the
        terminal's master, None without a terminal. Raises the errors of `_run`."""
        return self._spawn(["create", "--bundle", self._directory], stdio, tty, PID)

    def execute(
        self, process: Message, stdio: Stdio, *, tty: bool, name: str
    ) -> tuple[int, int | None]:
        """Start another process in the container; return its pid and the master of its terminal
        (None without a terminal). Fields that `process` lacks are taken from config.json. Raises
        the errors of `_run`."""
        path = f"{self._directory}/{name}.json"
        own = atomic_file.read_json(f"{self._directory}/{CONFIG}")["process"]
        atomic_file.write_json(path, {**own, **process, "terminal": tty})
        try:
            return self._spawn(["exec", "--detach", "--process", path], stdio, tty, f"{name}.pid")
        finally:
            os.unlink(path)

    def start(self) -> None:
        self._run(["start", self.id])

    def kill(self, number: int) -> None:
        self._run(["kill", self.id, str(number)])

    def delete(self) -> None:
        """Let the runtime delete the container's cgroups and the runtime's own state, and run the
        poststop hooks. Raises the errors of `_run`."""
        self._run(["delete", "--force", self.id])

    def _spawn(
        self, command: Sequence[str], stdio: Stdio, tty: bool, pid_file: str
    ) -> tuple[int, int | None]:
        if not tty:
            self._run([*command, "--pid-file", pid_file, self.id], stdio)
            return _take_pid(pid_file), None
        name = f"{pid_file}.{CONSOLE}"
        with _Listener(name) as listener:
            self._run([*command, "--pid-file", pid_file, "--console-socket", name, self.id], stdio)
            return _take_pid(pid_file), listener.take()

    def _run(self, command: Sequence[str], stdio: Stdio | None = None) -> None:
        """Run a command of the other runtime.

        Raises:
        - PeerError, with the last message of the runtime's log, when the command fails
        - NotFound when it fails because the file to execute is not in the container
        - KernelError when the runtime cannot be executed
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        logged = _size(LOG)
        try:
            streams = stdio or (null, null, null)
            pid = os.posix_spawn(
                self._binary,
                [*self._head, *command],
                ENVIRONMENT,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, number, place) for place, number in enumerate(streams)
                ],
                # Python ignores SIGPIPE and SIGXFSZ from its start on, and ignored signals stay so
                # over execve(2).
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD],
                setsigmask=[],
            )
        except OSError as error:
            raise KernelError("execve", repr(self._binary), error.errno or 0) from None
        finally:
            os.close(null)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise self._failure(command[0], code, logged)

    def _failure(self, verb: str, code: int, logged: int) -> Error:
        message = _last_message(logged)
        how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        text = f"{os.path.basename(self._binary)} {verb}: {message or how}"
        missing = verb in ("create", "start", "exec") and any(
            words in message for words in NO_SUCH_PROGRAM
        )
        return NotFound(text) if missing else PeerError(text)


class _Listener:
    """A socket to which a runtime sends the master of the container's terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._socket = _Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)

    def __enter__(self) -> _Listener:
        self._socket.bind(self._name)
        self._socket.listen(1)
        self._socket.settimeout(CONSOLE_TIMEOUT_S)
        return self

    def take(self) -> int:
        """Return the terminal's master, which the runtime sends. Raises PeerError."""
        try:
            number, _ = self._socket._accept()  # type: ignore[attr-defined]
            connection = _Socket(fileno=number)
            try:
                connection.settimeout(CONSOLE_TIMEOUT_S)
                _, ancillary, _, _ = connection.recvmsg(4096, CMSG_SPACE(4), MSG_CMSG_CLOEXEC)
            finally:
                connection.close()
        except (OSError, Error) as error:
            raise PeerError(f"the runtime has sent no terminal: {error}") from None
        fds = received(ancillary)
        if len(fds) != 1:  # CMSG_SPACE is aligned: there is room for two
            close_all(fds)
            raise PeerError(
                f"the runtime must send one descriptor, the terminal, but sent {len(fds)}"
            )
        return fds[0]

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        os.unlink(self._name)


def start(
    compiled: CompiledContainer, directory: str, stdio: Stdio, pause: PauseProcess | None
) -> StartedProcess:
    """Start the container; return its first process. Must run in a fork of the shim. Raises
    Error."""
    record = compiled.file.other_runtime
    assert record is not None and compiled.cgroup is not None
    attach(compiled, directory, pause)
    runtime = RuntimeCommand(record, directory)
    console = None
    try:
        pid, console = runtime.create(stdio, tty=compiled.file.tty)
        runtime.start()
    except BaseException:
        if console is not None:
            os.close(console)
        try:
            runtime.delete()
        except Error as error:
            warn(str(error))
        raise
    return _process(pid, compiled.cgroup, console)


def execute(
    record: OtherRuntime, request: messages.StartExec, container: SupervisedContainer, stdio: Stdio
) -> StartedProcess:
    """Start another process in a running container. Must run in a fork of the shim. Raises
    Error."""
    runtime = RuntimeCommand(record, container.directory)
    name = f"exec-{os.getpid()}"
    pid, console = runtime.execute(request.process, stdio, tty=request.tty, name=name)
    return _process(pid, container.group, console)


def attach(compiled: CompiledContainer, directory: str, pause: PauseProcess | None) -> None:
    """Move this process into a new mount namespace, which its children inherit, and attach the
    container's mounts there."""
    unshare(CLONE_NEWNS)
    real = os.path.realpath(directory)
    above = max(
        (
            point.path
            for point in mount_points()
            if os.path.commonpath([point.path, real]) == point.path
        ),
        key=len,
    )
    # Otherwise the mounts that follow would propagate to the host: a new mount namespace stays in
    # the peer groups of the old one (mount_namespaces(7)). Only this mount becomes a slave, so that
    # volumes that are shared with the host stay shared.
    kernel_mount.mount(None, above, None, MS_SLAVE)
    for place, number in zip(compiled.attached, compiled.fds, strict=True):
        kernel_mount.move_mount(number, f"{directory}/{place}")
    for place, name in compiled.pinned.items():
        if pause is None or name not in pause.mounts:
            raise InvalidArgument(f"the pod has no mount {name!r}")
        # A clone: move_mount(2) would take the pod's own mount away, which further containers need.
        clone = pinned.clone(pause.mounts[name], f"/proc/{pause.pid}/ns/mnt")
        kernel_mount.move_mount(clone, f"{directory}/{place}")
        os.close(clone)
    compiled.close()


def _process(pid: int, group: Cgroup, console: int | None) -> StartedProcess:
    """Return the process that a runtime has started. A process that has ended already is a zombie
    until the shim reaps it, so its pid is not reused."""
    status = stat(pid)
    if status is None:
        raise PeerError(f"the runtime's process {pid} does not exist")
    process = StartedProcess(pid, status.start_time, group, console)
    process.of_other_runtime = True
    return process


def _take_pid(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            pid = int(file.read())
        os.unlink(path)
        return pid
    except (OSError, ValueError) as error:
        raise PeerError(f"cannot read the runtime's pid file: {error}") from None


def _last_message(since: int) -> str:
    """Return the last message in the log after the offset `since`. A line is a JSON object or plain
    text."""
    try:
        with open(LOG, "rb", buffering=0) as file:
            file.seek(max(since, _size(LOG) - LOG_READ_BYTES))
            lines = (file.readall() or b"").decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            entry = jsontext.loads(line)
        except ValueError:
            return line.strip()[:2000]
        if isinstance(entry, dict) and entry.get("msg"):
            return str(entry["msg"])[:2000]
    return ""


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
