"""Descriptors and pids that pass between us and our caller: what a container gets of ours, and who
gets the container's."""

from __future__ import annotations

import os

from pyrunc import atomic_file, debug
from pyrunc.errors import InvalidArgument, KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.container.create import Created
    from pyrunc.container.exec import Executed
    from pyrunc.launch.run import ChildProcess


def preserved(count: int) -> tuple[int, ...]:
    """Descriptors 3 and up that go into the container. Raises InvalidArgument."""
    numbers = range(3, 3 + count)
    for number in numbers:
        try:
            os.fstat(number)
        except OSError:
            raise InvalidArgument(f"--preserve-fds: descriptor {number} is not open") from None
    return tuple(numbers)


def activated() -> int:
    """How many descriptors, from 3 up, a service manager gave to this process (sd_listen_fds(3)):
    what it inherited in its environment from somebody who got some is not meant for it."""
    count = os.environ.get("LISTEN_FDS", "")
    ours = os.environ.get("LISTEN_PID", "") == str(os.getpid())
    return int(count) if ours and count.isascii() and count.isdigit() else 0


def hand_out(
    options: dict[str, Any], made: ChildProcess | Created | Executed, detached: bool
) -> None:
    """Give the terminal, the pidfd and the pid to whoever asked for them, the pid last."""
    if made.console_fd is not None and detached:
        _send_descriptor(options["console_socket"], made.console_fd, b"/dev/ptmx")
        os.close(made.console_fd)
    if options["pidfd_socket"]:
        _send_descriptor(options["pidfd_socket"], made.pidfd, b"pidfd")
    if options["pid_file"]:
        path = os.path.abspath(options["pid_file"])
        _write_pid(path, made.pid)
        debug.say("wrote pid %d to %s", made.pid, path)


def _write_pid(path: str, pid: int) -> None:
    """Whole and at once, by a rename; what is no file (`/dev/stdout`, `>(...)`, a FIFO) is written
    to. Raises OSError."""
    text = str(pid).encode()
    if os.path.exists(path) and (not os.path.isfile(path) or path.startswith("/dev/")):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    else:
        atomic_file.write_bytes(path, text, mode=0o644)


def _send_descriptor(path: str, descriptor: int, name: bytes) -> None:
    """One message with the descriptor to a stream socket, whose path may be longer than an address
    takes."""
    import array
    from _socket import AF_UNIX, SCM_RIGHTS, SOCK_CLOEXEC, SOCK_STREAM, SOL_SOCKET, socket

    folder, file = os.path.split(os.path.abspath(path))
    there = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{there}/{file}")
        debug.say("sending %s to %s", name.decode(), path)
        connection.sendmsg([name], [(SOL_SOCKET, SCM_RIGHTS, array.array("i", [descriptor]))])
    except OSError as error:
        raise KernelError.of(error, "connect", f"to the socket '{path}'") from None
    finally:
        connection.close()
        os.close(there)


def open_missing_stdio() -> None:
    """Descriptors 0 to 2 that our caller closed become /dev/null, so that no file of ours takes
    their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open("/dev/null", os.O_RDWR), number)
