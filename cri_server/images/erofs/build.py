"""Builds the index of an image from its layers' tars, in a job. The kernel parses the index, so
this job runs no decompressor: a decompressor that a hostile layer has taken over could forge the
index."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cri_server.images.erofs.format import TAG_BYTES
from cri_server.images.erofs.layer_tree import read_layer
from cri_server.images.erofs.merge import merged, without_repetitions
from cri_server.images.erofs.tar_file import Growth, TarFile
from cri_server.images.erofs.write import IndexWriter, iterate_pieces
from cri_server.images.formats.digests import hex_of
from cri_server.images.layers import jail, layer_job
from cri_server.images.layers.inflate import UnpackLimits
from cri_server.images.reserve import Reserve
from pyrunc.errors import ResourceExhausted
from pyrunc.kernel.fd import pwrite_all
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

FILE = "index"
_COPIED_AT_ONCE = 1 << 20


def build(
    tar_fds: Sequence[int],
    diff_ids: Sequence[str],
    chain: Sequence[int],
    out_fd: int,
    uuid: bytes,
    limits: UnpackLimits,
    tick: Callable[[], None] = lambda: None,
    growth: Growth | None = None,
) -> None:
    """Write the index to `out_fd`, an empty file.

    - `tar_fds`: the layers' tars, which become the devices of the mount.
    - `diff_ids`: the digests of the tars, in the same order.
    - `chain`: for each layer of the image, bottom first, the number of its tar, counted from 0.
    - `tick`: called regularly; it may raise.
    - `growth`: waits for more data in tars that are still being written; None if all are complete.

    Raises BadLayer, ResourceExhausted, OSError.
    """
    tars = [TarFile(fd, growth) for fd in tar_fds]
    layers = [read_layer(tar, number, limits, tick) for number, tar in enumerate(tars, 1)]
    try:
        root = merged(layers[number] for number in without_repetitions(chain))
        index = IndexWriter(len(tars), uuid).write(root)
    except MemoryError:
        raise ResourceExhausted("not enough memory to index the image's files") from None
    # The table of devices comes last, because a tar's size is known only when its process has
    # ended. The tree can be made before.
    for tar in tars:
        tar.complete()
    index.put_devices(
        [
            (hex_of(diff_id)[:TAG_BYTES].encode(), tar.size_bytes)
            for diff_id, tar in zip(diff_ids, tars, strict=True)
        ]
    )
    reserve = Reserve(out_fd, limits.folder)
    for at in range(0, len(index.content), _COPIED_AT_ONCE):
        part = index.content[at : at + _COPIED_AT_ONCE]
        reserve.charge(len(part))
        pwrite_all(out_fd, part, at)
    for file in index.sparse:
        for target, source, length in iterate_pieces(file):
            reserve.charge(length)
            _copy(tars[file.device - 1], source, out_fd, target, length)
            tick()
    os.ftruncate(out_fd, index.size_bytes)


def _copy(tar: TarFile, source: int, fd: int, target: int, length: int) -> None:
    while length:
        part = tar.at(source, min(length, _COPIED_AT_ONCE))
        pwrite_all(fd, part, target)
        source, target, length = source + len(part), target + len(part), length - len(part)


class IndexWork(Record):
    """The arguments of the job that builds an index in `folder`.

    - `tars`: paths of complete tars; empty when the job gets descriptors of partial tars.
    - `diff_ids`: the digests of all tars, in the same order.
    - `chain`: for each layer, bottom first, the number of its tar, counted from 0.
    - `uuid`: in hexadecimal."""

    folder: AbsolutePath
    tars: Sequence[AbsolutePath]
    diff_ids: Sequence[str]
    chain: Sequence[int]
    uuid: str
    limits: UnpackLimits


def job(arguments: Message, fds: list[int]) -> int:
    """Build an index, as a job of the zygote; return the exit code 0.

    `arguments`: an `IndexWork`. `fds`, in this order:

    - the pipe of a `Growth` and the tars, if the tars are still being written;
    - the pipe on which progress is reported.
    """
    *tar_fds, progress_fd = fds
    work = IndexWork.of(arguments)
    tick = layer_job.begin(progress_fd)
    gc.disable()  # a tree of a million nodes has no cycles, and the process ends with it
    with layer_job.writing(work.folder, "indexing the layers of an image"):
        build_in(work, tick, tar_fds, jail.enter)
    return 0


def build_in(
    work: IndexWork,
    tick: Callable[[], None],
    fds: Sequence[int] = (),
    restrict: Callable[[str], str] = lambda folder: folder,
) -> None:
    """Write the index to FILE in the job's folder. `fds`: none for complete tars; for tars that are
    still being written, the pipe of a `Growth` and the tars. `restrict` is called with the folder
    when all tars are open. It returns the folder's new path, because it may change the root
    directory.

    Raises BadLayer, ResourceExhausted, OSError.
    """
    growth, tars = (Growth(fds[0]), list(fds[1:])) if fds else (None, [])
    with ExitStack() as stack:
        tars += [_open(path, os.O_RDONLY, stack) for path in work.tars]
        folder = restrict(work.folder)
        out_fd = _open(os.path.join(folder, FILE), os.O_RDWR | os.O_CREAT | os.O_EXCL, stack)
        uuid = bytes.fromhex(work.uuid)
        build(tars, work.diff_ids, work.chain, out_fd, uuid, work.limits, tick, growth)


def _open(path: str, flags: int, stack: ExitStack) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd
