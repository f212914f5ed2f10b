"""Runs the doctor's read-only checks as a job, in a process that the zygote forks. The server
itself does not import the checks: with the YAML parser for kubelet's configuration, they would take
2 MiB of memory."""

from __future__ import annotations

import sys

from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

PRINT_PROBLEMS = "cri_server.doctor.job:print_problems"


def print_problems(arguments: Message, fds: list[int]) -> None:
    """Read the server's configuration as JSON from stdin, and examine this machine. Print a JSON
    list with the logging level and the text of each problem."""
    # Imported here, in the fork, so that the zygote does not have the modules.
    import msgspec

    from cri_server.config import Config
    from cri_server.doctor.examine import problems
    from cri_server.doctor.model import Machine

    set_batch_policy()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    sys.stdout.buffer.write(msgspec.json.encode(list(problems(Machine(config)))))
