"""Helpers of the jobs that write a layer's files: start a job, report progress, convert the
kernel's errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cri_server.images.formats.digests import algorithm_of
from cri_server.images.layers.inflate import LayerWork, TarStream
from cri_server.images.layers.ring import Receiver
from pyrunc.errors import KernelError, ResourceExhausted
from pyrunc.kernel.allocator import keep_freed_memory
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


def begin(progress_fd: int) -> Callable[[], None]:
    """Put this process under SCHED_BATCH. Return a function that reports progress by writing a byte
    to the pipe `progress_fd`. The function never blocks."""
    set_batch_policy()
    os.set_blocking(progress_fd, False)

    def tick() -> None:
        with suppress(BlockingIOError):  # the pipe is full: a notification is pending
            os.write(progress_fd, b".")

    return tick


def receive(arguments: Message, fds: list[int]) -> tuple[LayerWork, TarStream, Callable[[], None]]:
    """Return a job's parsed arguments, the layer's decoded content, and a function that reports
    progress. `arguments`: a `LayerWork`. `fds`: the descriptors of a `Receiver`, then the progress
    pipe."""
    *ends, progress_fd = fds
    work = LayerWork.of(arguments)
    receiver = Receiver(*ends, copying=True)
    stream = TarStream(receiver, work.limits, decoded=True, algorithm=algorithm_of(work.diff_id))
    keep_freed_memory()
    return work, stream, begin(progress_fd)


@contextmanager
def writing(folder: str, doing: str) -> Iterator[None]:
    """Convert an OSError of the `with` block into ResourceExhausted if the disk is full, else into
    KernelError. `folder`: where the block writes. `doing`: the block's work, for the error."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number in FULL:
            raise ResourceExhausted(f"{doing}: {reason(number, folder)}") from None
        raise KernelError("write", folder, number, doing) from None
