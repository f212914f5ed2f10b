"""The records and descriptors that the keeper stores of a pod, so that another shim can go on with
it when its own was killed.

Of the pause process these are its pidfd, the pod's network namespace and pinned mounts. Of a
container these are the pidfd of its first process and the reading ends of its output, pipes or a
terminal's master: they stay open in the keeper, so that no output is lost while no shim lives. A
pipe's writing end is never stored, because its reader would wait for an end that does not come.

Lost with a killed shim are exec sessions, attached clients, the stdin of a container without a
terminal, and output that it had read but not written: the beginning of an unfinished line, and what
came in the 50 microseconds between the two calls.
"""

from __future__ import annotations

import os

from pyrunc import ipc
from pyrunc.cgroups.group import Cgroup
from pyrunc.errors import InvalidArgument
from pyrunc.shim.messages import StoredContainer, StoredPause
from pyrunc.shim.starter import PauseProcess, Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.shim.session import Container


def pause_name(sandbox_id: str) -> str:
    """Return the name of a pod's pause process in the keeper."""
    return f"pod/{sandbox_id}"


def container_name(container_id: str) -> str:
    """Return the name of a container in the keeper."""
    return f"container/{container_id}"


def of_pause(pause: PauseProcess) -> tuple[StoredPause, list[int]]:
    """Return the record and copies of the descriptors, the caller's to close."""
    record, fds = pause.record()
    return record, [pause.open_pidfd(), *map(os.dup, fds)]


def pause(record: StoredPause, fds: list[int]) -> PauseProcess:
    """Return the pause process of a record; it owns the descriptors. Raises InvalidArgument after
    closing them."""
    try:
        pidfd, *others = fds
        pause_process = PauseProcess.of(record, others)
    except (KeyError, ValueError) as error:
        ipc.close_all(fds)
        raise InvalidArgument(f"the stored pause process: {error!r}") from None
    pause_process.pidfd = pidfd
    return pause_process


def of_container(container: Container, process: Process) -> tuple[StoredContainer, list[int]]:
    """Return the record of a running container and copies of its descriptors, the caller's to
    close."""
    record = StoredContainer(
        pid=process.pid,
        start_time=process.start_time,
        group=process.group.record(),
        poststop=process.has_poststop,
        other=process.of_other_runtime,
        started_at_ns=container.started_at_ns,
        terminal=process.console_fd is not None,
        stdin=container.input is not None,
        log_path=container.log.path,
        log_directory=container.log.directory,
        outputs=[output.stream for output in container.outputs if not output.ended],
    )
    outputs = [os.dup(output.fd) for output in container.outputs if not output.ended]
    return record, [process.open_pidfd(), *outputs]


def process(record: StoredContainer, fds: Sequence[int]) -> Process:
    """Return a container's first process from its record. The descriptors stay the caller's until
    this has returned. Raises InvalidArgument."""
    if len(fds) != 1 + len(record.outputs):
        raise InvalidArgument(
            f"the stored container: {len(fds)} descriptors for {list(record.outputs)}"
        )
    console_fd = fds[1] if record.terminal and record.outputs else None
    first = Process(record.pid, record.start_time, Cgroup.from_record(record.group), console_fd)
    first.has_poststop, first.of_other_runtime = record.poststop, record.other
    first.pidfd = fds[0]
    return first
