"""Decodes a blob in a separate process, which can name no file, open no socket and reach no other
process.

Decoders are C code that reads hostile bytes. A layer that takes one over decides only which bytes
come out; the receiving process hashes a copy, and accepts only the content that the image's
configuration names.
"""

from __future__ import annotations

from cri_server.images.layers import jail
from cri_server.images.layers.inflate import TarStream, UnpackLimits
from cri_server.images.layers.ring import Interrupted, Receiver, RingSender
from pyrunc.errors import KernelError
from pyrunc.kernel.allocator import keep_freed_memory
from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message


def decode(blob: int | Receiver, out: RingSender, limits: UnpackLimits) -> None:
    """Decode the blob into `out`. `blob`: a descriptor, which is read from its position on, or a
    ring's receiver.

    Raises BadLayer, ResourceExhausted; Interrupted when the receiver is closed.
    """
    stream = TarStream(blob, limits, hashed=False)
    for block in stream.blocks():
        out.write(block)
    out.finish()


def job(arguments: Message, fds: list[int]) -> int:
    """Decode a blob, as a job of the zygote. The arguments are `UnpackLimits`. `fds`: the blob, as
    a file or the three descriptors of a `Receiver`; the three of a `RingSender`; and the progress
    pipe, whose end tells the server that this process is gone."""
    *blob_fds, memory, full, freed, _ = fds
    blob: int | Receiver
    if len(blob_fds) == 1:
        blob = blob_fds[0]
    else:
        blob = Receiver(*blob_fds)
        blob.map()
    out, limits = RingSender(memory, full, freed), UnpackLimits.of(arguments)
    keep_freed_memory()
    # SCHED_BATCH: the process that is woken for a block would otherwise take this one's processor
    # while another one is idle (348 of 359 switches in a pull of 150 MB, a quarter of its time).
    set_batch_policy()
    jail.enter_decoder()
    try:
        decode(blob, out, limits)
    except Interrupted:  # the receiver's error is the one to report
        return 1
    except OSError as error:
        raise KernelError.of(error, "read", limits.subject) from None
    return 0
