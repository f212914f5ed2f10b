"""`start`: lets a container execute its command. Until then the container's process waits on its
start socket.

The process accepts one connection and reads one byte. execve closes the connection, which means
success. Otherwise the process sends an errno, if execve failed, or a message, if a hook failed.
"""

from __future__ import annotations

import os
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_STREAM
from _socket import socket as _Socket
from errno import ECONNREFUSED, ENOENT

from pyrunc import debug
from pyrunc.container.state import START_SOCKET
from pyrunc.errors import Error, KernelError, WrongState
from pyrunc.kernel.fd import short_path

OUTPUT_LIMIT_BYTES = 4096
MESSAGE_BYTES = 24  # of the launcher's message about a failed hook; an errno has 4 bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def release(state_dir: str, args: Sequence[str] = ("",), env: Sequence[str] = ()) -> None:
    """Let the container's waiting process execute its command, and remove the start socket. Returns
    when the command runs. `args`, `env`: the command's arguments and environment, for error
    messages only.

    Raises:

    - WrongState when no process waits: the container was started before, or is dead
    - Error when the process ends before execve
    - HookFailed, KernelError
    - the errors of `create` for a command that cannot be executed
    """
    path = f"{state_dir}/{START_SOCKET}"
    connection = _connect(state_dir, path)
    try:
        # Before the byte: from here on the status is "running", and a second start finds no socket.
        os.unlink(path)
        connection.send(b"\1")
        debug.say("released the process of %s to run its program", state_dir)
        # The connection is close-on-exec in the container: its end means that execve has succeeded.
        answer, output = _answer(connection)
    finally:
        connection.close()
    if len(answer) == MESSAGE_BYTES:
        from pyrunc.launch.run import HookFailed
        from pyrunc.program.launch import MESSAGE
        from pyrunc.program.model import FAILURE

        tag, op_index, index, wait_status = MESSAGE.unpack(answer)
        if tag == FAILURE:
            raise KernelError(
                "start",
                f"operation {op_index} of the launcher's program",
                abs(index),
                "after `start`, before the container's command was executed",
            )
        raise HookFailed(index, wait_status, output)
    if answer:
        number = abs(int.from_bytes(answer[:4], "little", signed=True))
        from pyrunc.launch.run import describe_failure  # a good start needs none of these
        from pyrunc.plan.lower_process import NO_PROGRAM, argument_sizes
        from pyrunc.program.errors import OperationFailed

        sizes = argument_sizes(args, env)
        raise describe_failure(
            OperationFailed("exec", args[0], number, sizes, -1, None, NO_PROGRAM), args
        )


def _connect(state_dir: str, path: str) -> _Socket:
    connection = _Socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        with short_path(state_dir) as short:
            connection.connect(f"{short}/{START_SOCKET}")
        return connection
    except OSError as error:
        connection.close()
        if error.errno == ENOENT:
            raise WrongState("cannot start an already running container") from None
        # The name outlives its process: the file is there, and nothing listens.
        if error.errno == ECONNREFUSED:
            raise WrongState("cannot start a container that has stopped") from None
        raise KernelError.of(error, "connect", f"'{path}'") from None


def _answer(connection: _Socket) -> tuple[bytes, bytes]:
    """Return the process's message, empty on success, and the output of a failed hook. Raises Error
    when the process has ended without an answer."""
    try:
        answer = connection.recv(MESSAGE_BYTES)
        output = b""
        while len(answer) == MESSAGE_BYTES and (more := connection.recv(OUTPUT_LIMIT_BYTES)):
            output += more
        return answer, output[:OUTPUT_LIMIT_BYTES]
    except ConnectionResetError:  # it died with the byte unread
        raise Error("the container ended before it could be started") from None
