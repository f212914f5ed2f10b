"""Sends the seccomp listener of a process to the agent's socket, `listenerPath`. The message is the
container process state as text, with the listener's descriptor (SCM_RIGHTS).

When the agent cannot be reached the launch fails, because the process would hang in its first
filtered call. Source: runtime-spec config-linux.md, "The Container Process State".
"""

from __future__ import annotations

import array
import os
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_CLOEXEC, SOCK_STREAM, SOL_SOCKET, socket

from pyrunc import jsontext
from pyrunc.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.launch.run import ChildProcess
    from pyrunc.plan.model import SendListener


def send(
    process: ChildProcess, step: SendListener, oci_version: str, state: dict[str, Any]
) -> None:
    """Send the process's listener and the container's `state` to the agent, and close our copy
    of the listener. Raises KernelError."""
    message: dict[str, Any] = {"ociVersion": oci_version, "fds": ["seccompFd"], "pid": process.pid}
    if step.metadata:
        message["metadata"] = step.metadata
    assert process.listener_fd is not None
    connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC)
    try:
        connection.connect(os.fsencode(step.path))
        rights = array.array("i", [process.listener_fd])
        connection.sendmsg(
            [jsontext.dumps({**message, "state": state}).encode("ascii")],
            [(SOL_SOCKET, SCM_RIGHTS, rights)],
        )
    except OSError as error:
        raise KernelError.of(error, "connect", f"to the seccomp listener '{step.path}'") from None
    finally:
        connection.close()
    # The agent has its own copy. If the agent ends while another copy is open, filtered calls wait
    # for ever; if there is no other copy, they fail with ENOSYS.
    os.close(process.listener_fd)
    process.listener_fd = None
