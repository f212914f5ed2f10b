"""Exchanges descriptors with the runtime's caller: takes the descriptors for the container, and
sends the container's terminal, pidfd and pid."""

from __future__ import annotations

import os

from pyrunc import atomic_file, debug
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel.fd import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.container.process import ContainerProcess
    from pyrunc.launch.run import ChildProcess
    from pyrunc.spec.model import Process


def preserved(count: int) -> tuple[int, ...]:
    """Return the numbers 3, 4, … of the `count` descriptors that the container gets. Raises
    InvalidArgument when one of them is not open."""
    numbers = range(3, 3 + count)
    for number in numbers:
        try:
            os.fstat(number)
        except OSError:
            raise InvalidArgument(f"--preserve-fds: descriptor {number} is not open") from None
    return tuple(numbers)


def activated() -> int:
    """Return how many descriptors, from 3 up, a service manager has passed to this process
    (sd_listen_fds(3)); 0 if LISTEN_PID names another process."""
    count = os.environ.get("LISTEN_FDS", "")
    # LISTEN_PID is the process to which the descriptors were passed.
    ours = os.environ.get("LISTEN_PID", "") == str(os.getpid())
    return int(count) if ours and count.isascii() and count.isdigit() else 0


def pass_descriptors(
    options: dict[str, Any], process: ChildProcess | ContainerProcess, detached: bool
) -> None:
    """Send the pidfd to --pidfd-socket and, when detached, the terminal's master to
    --console-socket; write --pid-file last. Raises KernelError, OSError."""
    if process.console_fd is not None and detached:
        _send_descriptor(options["console_socket"], process.console_fd, b"/dev/ptmx")
        os.close(process.console_fd)
    if options["pidfd_socket"]:
        _send_descriptor(options["pidfd_socket"], process.pidfd, b"pidfd")
    # Last, as in runc, so that the file is a sign that the rest is done.
    if options["pid_file"]:
        path = os.path.abspath(options["pid_file"])
        _write_pid(path, process.pid)
        debug.say("wrote pid %d to %s", process.pid, path)


def check_terminal(process: Process | None, console_socket: str | None, detached: bool) -> None:
    """Raise InvalidArgument if a detached process with a terminal has no --console-socket, or if
    any other process has a --console-socket."""
    has_terminal = process is not None and process.terminal
    if has_terminal and detached and not console_socket:
        raise InvalidArgument(
            "cannot allocate tty if pyrunc will detach without setting console socket"
        )
    if console_socket and not (has_terminal and detached):
        raise InvalidArgument("cannot use console socket if pyrunc will not detach or allocate tty")


def _write_pid(path: str, pid: int) -> None:
    """Write the pid file atomically, by a rename. A path that is not a regular file (`/dev/stdout`,
    `>(...)`, a FIFO) is opened and written. Raises OSError."""
    text = str(pid).encode()
    if os.path.exists(path) and (not os.path.isfile(path) or path.startswith("/dev/")):
        with closing_fd(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as descriptor:
            os.write(descriptor, text)
    else:
        atomic_file.write_bytes(path, text, mode=0o644)


def _send_descriptor(path: str, descriptor: int, name: bytes) -> None:
    """Send the descriptor to the stream socket at `path`, in one message with the text `name`, as
    runc does. Raises KernelError."""
    from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM, socket

    from pyrunc import ipc
    from pyrunc.kernel.fd import short_path

    folder, file = os.path.split(os.path.abspath(path))
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        with short_path(folder) as short:
            connection.connect(f"{short}/{file}")
        debug.say("sending %s to %s", name.decode(), path)
        # One message with the name as its text, as runc sends it (libcontainer/utils).
        ipc.send_text(connection, name, [descriptor])
    except OSError as error:
        raise KernelError.of(error, "connect", f"to the socket '{path}'") from None
    finally:
        connection.close()


def open_missing_stdio() -> None:
    """Open /dev/null in place of each standard stream (0 to 2) that our caller has closed.
    Otherwise the next file that we open would get the stream's number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open("/dev/null", os.O_RDWR), number)
