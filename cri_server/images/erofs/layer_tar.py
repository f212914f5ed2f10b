"""Hashes a layer's content, and writes it as an uncompressed tar, in a job. Another process has
decoded the content."""

from __future__ import annotations

import os
from collections.abc import Callable

from cri_server.images.layers import jail, layer_job
from cri_server.images.layers.inflate import TarStream
from cri_server.images.layers.zeros import is_hole
from cri_server.images.reserve import Reserve
from pyrunc.kernel.fd import closing_fd, pwrite_all, start_writeback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

FILE = "tar"
_TICK_BYTES = 4 << 20
# The disk writes while more is decoded, so that the sync at the end has little left to do.
_WRITEBACK_BYTES = 8 << 20


def write_tar(
    stream: TarStream,
    folder: str,
    diff_id: str,
    tick: Callable[[], None] = lambda: None,
    store: str = "",
) -> None:
    """Write the content of `stream` to FILE in `folder`. FILE must be missing or empty. `tick` is
    called every few MiB and at the end, and may raise. `store`: the path that ResourceExhausted
    names for a full disk, by default `folder`.

    Raises ResourceExhausted, OSError, and BadLayer when the digest of the content is not `diff_id`.
    """
    # Without O_EXCL: `open_new` may have created the file for the index builder.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(os.path.join(folder, FILE), flags, 0o600)
    on_progress = begun = at = 0
    reserve = Reserve(fd, store or folder)
    with closing_fd(fd):
        for block in stream.blocks():
            size = stream.size_bytes
            if not is_hole(block):
                reserve.charge(len(block))
                pwrite_all(fd, block, at)
            at = size
            if size - begun >= _WRITEBACK_BYTES:
                start_writeback(fd, begun, size - begun)
                begun = size
            if size - on_progress >= _TICK_BYTES:
                on_progress = size
                tick()
        os.ftruncate(fd, at)
    tick()  # the index builder may read the tail now
    stream.expect(diff_id)


def open_new(folder: str) -> int:
    """Create the empty FILE that `write_tar` will fill; return a descriptor for reading it, which
    the caller closes."""
    flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(folder, FILE), flags, 0o600)


def job(arguments: Message, fds: list[int]) -> int:
    """Write a layer's tar, as a job of the zygote; return the exit code 0. `arguments`: a
    `LayerWork`; `fds`: the descriptors of a `Receiver` of the decoded content, then the pipe on
    which progress is reported."""
    work, stream, tick = layer_job.receive(arguments, fds)
    with layer_job.writing(work.folder, "writing a layer's tar"):
        folder = jail.enter(work.folder, jail.TAR_MEMORY_LIMIT_BYTES)
        write_tar(stream, folder, work.diff_id, tick, work.limits.folder)
    return 0
