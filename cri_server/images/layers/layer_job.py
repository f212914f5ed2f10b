"""What the errands that write what is made of layers have in common: how they run, how they tell
that they get on, and words for what the kernel refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cri_server.images.formats.digests import algorithm_of
from cri_server.images.layers.inflate import LayerWork, Stream
from cri_server.images.layers.ring import Receiver
from pyrunc.errors import KernelError, ResourceExhausted
from pyrunc.kernel.allocator import keep_freed_memory
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


def begin(progress_fd: int) -> Callable[[], None]:
    """Run behind others, and answer what tells by the pipe `progress_fd` that there is progress.
    Never blocks."""
    set_batch_policy()
    os.set_blocking(progress_fd, False)

    def tick() -> None:
        try:
            os.write(progress_fd, b".")
        except BlockingIOError:  # nobody has read the last ones yet
            pass

    return tick


def receive(arguments: Message, fds: list[int]) -> tuple[LayerWork, Stream, Callable[[], None]]:
    """The work, the layer's content that another process has decoded, and what tells of progress.
    `arguments` are a `LayerWork`'s, `fds` a `Receiver`'s and the pipe of `begin`."""
    *ends, progress_fd = fds
    work = LayerWork.of(arguments)
    receiver = Receiver(*ends, copying=True)
    stream = Stream(receiver, work.limits, decoded=True, algorithm=algorithm_of(work.diff_id))
    keep_freed_memory()
    return work, stream, begin(progress_fd)


@contextmanager
def writing(folder: str, doing: str) -> Iterator[None]:
    """A block that writes in `folder`, `doing` what an error names: an OSError becomes
    ResourceExhausted or KernelError."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number in FULL:
            raise ResourceExhausted(f"{doing}: {reason(number, folder)}") from None
        raise KernelError("write", folder, number, doing) from None
