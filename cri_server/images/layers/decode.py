"""Decodes a compressed layer blob in a jailed process.

The jail lets the process use its open descriptors only: it cannot open a file or a socket, or
signal another process. Decoders are C code that reads hostile bytes. A layer that takes over its
decoder controls only the decoded bytes; the process that receives the bytes hashes its own copy,
and accepts only the diff id that the image's configuration names.
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
    """Decode a blob; the zygote runs this as a job. Return the exit code: 0, or 1 when the receiver
    is closed.

    `arguments`: `UnpackLimits`. `fds`, in this order:

    - the blob, as one file or as the three descriptors of a `Receiver`;
    - the three descriptors of the `RingSender` for the decoded content;
    - the progress pipe. Nothing is written to it; its end of file shows that the job has exited.
    """
    *blob_fds, memory, full, freed, _ = fds
    blob: int | Receiver
    if len(blob_fds) == 1:
        blob = blob_fds[0]
    else:
        blob = Receiver(*blob_fds)
        blob.map()
    out, limits = RingSender(memory, full, freed), UnpackLimits.of(arguments)
    keep_freed_memory()
    # SCHED_BATCH: otherwise the process that is woken for a block would take this process's
    # processor while another processor is idle (348 of 359 switches in a pull of 150 MB, a quarter
    # of its time).
    set_batch_policy()
    jail.enter_decoder()
    try:
        decode(blob, out, limits)
    except Interrupted:  # the receiver's error is the one to report
        return 1
    except OSError as error:
        raise KernelError.of(error, "read", limits.subject) from None
    return 0
