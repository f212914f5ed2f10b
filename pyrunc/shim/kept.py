"""What the server keeps of a pod, so that another shim can go on with it when its own was killed.

`kept` is a message's object and descriptors that only shims understand. Of the holder: its pidfd, the pod's network namespace and
pinned mounts. Of a container: the pidfd of its first process and what its output is read from, pipes or a terminal's master; they
stay open with the server, so that nothing breaks and nothing that is written is lost while no shim lives. A pipe's writing end
is never kept: its reader would wait for an end that does not come.

What a killed shim takes along: exec sessions, attached clients, the stdin of a container without a terminal, and what it had read
of the output but not written: the beginning of an unfinished line, or what came in the 50 microseconds between the two calls.
"""

from __future__ import annotations

import os

from pyrunc import ipc
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument
from pyrunc.shim.starter import Holder, Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.shim.session import Container

    Kept = tuple[dict[str, Any], list[int]]


def of_holder(holder: Holder) -> Kept:
    """The descriptors are copies, the caller's to close; here and below."""
    fields, fds = holder.to_message()
    return fields, [holder.open_pidfd(), *map(os.dup, fds)]


def holder(fields: dict[str, Any], fds: list[int]) -> Holder:
    """Owns the descriptors. Raises InvalidArgument: then they are closed."""
    try:
        pidfd, *others = fds
        found = Holder.from_message(fields, others)
    except (KeyError, TypeError, ValueError) as error:
        ipc.close_all(fds)
        raise InvalidArgument(f"what was kept of a holder: {error!r}") from None
    found.pidfd = pidfd
    return found


def of_container(container: Container, process: Process) -> Kept:
    """Of one that runs."""
    fields = {
        "pid": process.pid,
        "start_time": process.start_time,
        "group": process.group.record(),
        "poststop": process.has_poststop,
        "other": process.of_other_runtime,
        "started_at_ns": container.started_at_ns,
        "terminal": process.console_fd is not None,
        "stdin": container.input is not None,
        "log_path": container.log.path,
        "log_directory": container.log.directory,
        "outputs": [output.stream for output in container.outputs if not output.ended],
    }
    outputs = [os.dup(output.fd) for output in container.outputs if not output.ended]
    return fields, [process.open_pidfd(), *outputs]


def process(fields: dict[str, Any], fds: Sequence[int]) -> Process:
    """A container's first process. The descriptors stay the caller's until this has returned. Raises InvalidArgument."""
    try:
        if len(fds) != 1 + len(fields["outputs"]):
            raise ValueError(f"{len(fds)} descriptors for {fields['outputs']}")
        console_fd = fds[1] if fields["terminal"] and fields["outputs"] else None
        group = Cgroup.from_record(fields["group"])
        found = Process(int(fields["pid"]), int(fields["start_time"]), group, console_fd)
        found.has_poststop = bool(fields["poststop"])
        found.of_other_runtime = bool(fields.get("other"))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"what was kept of a container: {error!r}") from None
    found.pidfd = fds[0]
    return found
