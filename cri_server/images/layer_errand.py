"""What the errands that write what is made of layers have in common: how they run, how they tell that they get on, and words for what the
kernel refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyrunc.errors import KernelError, ResourceExhausted
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.scheduling import set_batch_policy


def begin(progress_fd: int) -> Callable[[], None]:
    """Run behind others, and answer what tells by the pipe `progress_fd` that there is progress. Never blocks."""
    set_batch_policy()
    os.set_blocking(progress_fd, False)

    def tick() -> None:
        try:
            os.write(progress_fd, b".")
        except BlockingIOError:  # nobody has read the last ones yet
            pass

    return tick


@contextmanager
def writing(folder: str, doing: str) -> Iterator[None]:
    """A block that writes in `folder`, `doing` what an error names: an OSError becomes ResourceExhausted or KernelError."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number in FULL:
            raise ResourceExhausted(f"{doing}: {reason(number, folder)}") from None
        raise KernelError("write", folder, number, doing) from None
