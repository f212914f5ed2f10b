"""A blob decoded in a process of its own, which can do nothing but that: no file, no socket, no
other process is within its reach.

Decoders are C, and a layer is hostile bytes. Should they make one run an attacker's code, all that
this code decides is which bytes come out, and the process that gets them hashes a copy: it takes
those that the image's configuration names, or none.
"""

from __future__ import annotations

from cri_server.images.layers import jail
from cri_server.images.layers.inflate import Limits, Stream
from cri_server.images.layers.ring import Interrupted, Receiver, Sender
from pyrunc.errors import KernelError
from pyrunc.kernel.allocator import keep_freed_memory
from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


def decode(blob: int | Receiver, out: Sender, limits: Limits) -> None:
    """Send what is in the blob, a descriptor that is read from its position on or what comes
    through a ring.

    Raises BadLayer, ResourceExhausted; Interrupted when nobody receives it any more.
    """
    stream = Stream(blob, limits, hashed=False)
    for block in stream.blocks():
        out.write(block)
    out.finish()


def job(arguments: Message, fds: list[int]) -> int:
    """What the zygote forks: `fds` are the blob, as a file or a `Receiver`'s descriptors, a
    `Sender`'s, and a pipe whose end is ours; the arguments are `Limits`'."""
    *blob_fds, memory, full, freed, _ = fds
    blob: int | Receiver
    if len(blob_fds) == 1:
        blob = blob_fds[0]
    else:
        blob = Receiver(*blob_fds)
        blob.map()
    out, limits = Sender(memory, full, freed), Limits.of(arguments)
    keep_freed_memory()
    set_batch_policy()
    jail.enter_decoder()
    try:
        decode(blob, out, limits)
    except Interrupted:  # what the other process failed with says more
        return 1
    except OSError as error:
        raise KernelError.of(error, "read", limits.subject) from None
    return 0
