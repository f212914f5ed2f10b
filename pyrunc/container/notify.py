"""sd_notify(3) for containers: passes READY from a socket in the container to the socket of the
service manager.

A service manager accepts messages only from the process that it started, and its socket is not in
the container. So when NOTIFY_SOCKET is set at create, the container gets a folder at /run/notify,
and `start` makes a socket in it. `start` then waits until a process in the container sends READY,
or init ends. It passes READY on, reports the container's process with MAINPID, and waits with
BARRIER until the manager has read these messages.
"""

from __future__ import annotations

import os
import select
from _socket import AF_UNIX, SOCK_CLOEXEC, SOCK_DGRAM, socket

from pyrunc import ipc
from pyrunc.errors import KernelError, kernel_errors
from pyrunc.kernel.fd import short_path
from pyrunc.spec.model import Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.spec.model import Spec

VARIABLE = "NOTIFY_SOCKET"
INSIDE, FOLDER, NAME = "/run/notify", "notify", "notify.sock"
MESSAGE_BYTES = 65536
BARRIER_TIMEOUT_S = 30


def with_socket(spec: Spec, state_dir: str) -> Spec:
    """Return the specification with a read-only bind mount of the notify folder, and NOTIFY_SOCKET
    in the environment of the container's command. Makes the folder in `state_dir`. Raises
    KernelError."""
    assert spec.process is not None
    source = f"{state_dir}/{FOLDER}"
    with kernel_errors("mkdir", f"'{source}'"):
        os.mkdir(source)
        # mkdir(2) is subject to the umask, and any user of the container has to reach the socket.
        os.chmod(source, 0o755)
    # A read-only mount hinders no connect(2), and keeps the container from replacing the socket by
    # another.
    options = ("bind", "nosuid", "noexec", "nodev", "ro")
    mount = Mount(INSIDE, "bind", source, options)
    env = (*spec.process.env, f"{VARIABLE}={INSIDE}/{NAME}")
    return spec.replace(mounts=(*spec.mounts, mount), process=spec.process.replace(env=env))


class NotifyProxy:
    """The socket in a container to which the container sends READY. It must be open before the
    container's command runs; `wait` then waits for READY."""

    def __init__(self, state_dir: str, host: str) -> None:
        """Open the socket in the container. `host`: the address of the service manager's socket, a
        path or an abstract name that begins with `@`. Raises KernelError."""
        self._host = host
        self._socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC)
        try:
            with short_path(f"{state_dir}/{FOLDER}") as path:
                self._socket.bind(f"{path}/{NAME}")
                # Any user of the container may report that it is ready.
                os.chmod(f"{path}/{NAME}", 0o777)
        except OSError as error:
            self._socket.close()
            raise KernelError.of(error, "bind", f"'{state_dir}/{FOLDER}/{NAME}'") from None

    def wait(self, pidfd: int, main_pid: int) -> bool:
        """Wait until the container is ready; report that to the service manager, with `main_pid` as
        MAINPID. False when init has ended instead."""
        waiter = select.poll()
        waiter.register(self._socket.fileno(), select.POLLIN)
        waiter.register(pidfd, select.POLLIN)
        try:
            while True:
                ready_fds = dict(waiter.poll())
                if self._socket.fileno() in ready_fds:
                    ready = _ready_line(self._socket.recv(MESSAGE_BYTES))
                    if ready:
                        _send_ready(self._host, ready, main_pid)
                        return True
                elif pidfd in ready_fds:
                    return False
        finally:
            self._socket.close()

    def close(self) -> None:
        """Close the socket without waiting."""
        self._socket.close()


def _ready_line(message: bytes) -> bytes:
    """Return the READY line of a container's message, empty if it has none. Other lines are not
    passed on, because the service manager would believe that the runtime sent them."""
    return next((line for line in message.split(b"\n") if line.startswith(b"READY=")), b"")


def _send_ready(host: str, ready: bytes, main_pid: int) -> None:
    address = b"\0" + os.fsencode(host[1:]) if host.startswith("@") else os.fsencode(host)
    reading, writing = os.pipe()
    connection = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC)
    try:
        connection.connect(address)
        connection.send(ready + b"\n")
        connection.send(b"MAINPID=%d\n" % main_pid)
        # BARRIER needs a separate message: if a message has other assignments, too, systemd ignores
        # all of them (sd_notify(3)).
        ipc.send_text(connection, b"BARRIER=1", [writing])
        # The manager then has the last copy: when it closes that, poll(2) reports POLLHUP.
        os.close(writing)
        writing = -1
        waiter = select.poll()
        waiter.register(reading, select.POLLIN)
        # The manager closes its end of the pipe when it has handled the earlier messages.
        waiter.poll(BARRIER_TIMEOUT_S * 1000)
    except OSError as error:
        raise KernelError.of(error, "notify", f"'{host}'") from None
    finally:
        connection.close()
        os.close(reading)
        if writing >= 0:
            os.close(writing)
