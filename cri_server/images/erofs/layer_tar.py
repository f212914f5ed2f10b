"""One layer's blob made into its uncompressed tar, in an errand: the only process of a mounted image in which a decoder meets
hostile bytes.

Two threads share the work: one reads and inflates, the other hashes and writes; the libraries release the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from queue import Queue

from cri_server.images import jail
from cri_server.images.erofs.build import to_error
from cri_server.images.inflate import BadLayer, LayerWork, Limits, Stream
from cri_server.images.ring import Receiver
from pyrunc.errors import Error
from pyrunc.kernel.allocator import keep_freed_memory
from pyrunc.kernel.fd import start_writeback
from pyrunc.kernel.scheduling import set_batch_policy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

FILE = "tar"
_TICK_BYTES = 4 << 20
_QUEUED_BLOCKS = 16  # of 256 KiB at most
_WRITEBACK_BYTES = (
    8 << 20
)  # the disk works while the next are inflated, so that the sync at the end finds little to do


def write_tar(
    blob: int | Receiver,
    folder: str,
    diff_id: str,
    limits: Limits,
    tick: Callable[[], None] = lambda: None,
    restrict: Callable[[str], str] = lambda folder: folder,
) -> None:
    """Write the content of the blob (a descriptor, from its position on, or what comes through a ring) to FILE in `folder`, which is
    empty if it is there. `tick` is called every few MiB and at the end, and may raise; `restrict` with the folder, in each thread,
    before that meets a byte of the blob, and answers where the folder is then.

    Raises BadLayer when it is not `diff_id`, ResourceExhausted, OSError.
    """
    with _Writer(folder, restrict) as writer:
        restrict(writer.folder)
        stream = Stream(blob, limits, hashed=False)
        ticked = 0
        for piece in stream.pieces(limits.size_bytes + 1):
            writer.put(piece)
            if stream.size_bytes - ticked >= _TICK_BYTES:
                ticked = stream.size_bytes
                tick()
        found = writer.finish()
        tick()  # the index can be made from here on
    if found != diff_id:
        raise BadLayer(f"the layer's content is {found}, not {diff_id} as the image's configuration says")


def open_new(folder: str) -> int:
    """Make the FILE that `write_tar` is to write; a descriptor for reading, which the caller closes."""
    flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(folder, FILE), flags, 0o600)


class _Writer:
    """A thread that hashes and writes what it is given; a context manager, whose end is the thread's."""

    def __init__(self, folder: str, restrict: Callable[[str], str]) -> None:
        self.folder, self._restrict = folder, restrict
        self._blocks: Queue[memoryview | None] = Queue(_QUEUED_BLOCKS)
        self._hash = hashlib.sha256()
        self._error: Exception | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tar", daemon=True)

    def __enter__(self) -> _Writer:
        self._thread.start()
        self._ready.wait()  # a restricted process starts no thread
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._blocks.put(None)
            self._thread.join()

    def put(self, block: memoryview) -> None:
        """Raises what went wrong with an earlier one."""
        if self._error:
            raise self._error
        self._blocks.put(block)

    def finish(self) -> str:
        """`sha256:…` of everything, which is written. Raises what went wrong."""
        self._blocks.put(None)
        self._thread.join()
        if self._error:
            raise self._error
        return f"sha256:{self._hash.hexdigest()}"

    def _run(self) -> None:
        try:
            try:
                self.folder = self._restrict(self.folder)
            finally:
                self._ready.set()
            self._write_all()
        except Exception as error:  # for the other thread
            self._error = error
            while self._blocks.get() is not None:  # which may be waiting for room
                pass

    def _write_all(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(self.folder, FILE), flags, 0o600)
        size = begun = 0
        try:
            while (block := self._blocks.get()) is not None:
                self._hash.update(block)
                size += len(block)
                while block:
                    block = block[os.write(fd, block) :]
                if size - begun >= _WRITEBACK_BYTES:
                    start_writeback(fd, begun, size - begun)
                    begun = size
        finally:
            os.close(fd)


def errand(arguments: Message, fds: list[int]) -> int:
    """What the zygote forks: `fds` are the blob, as a file or a `Receiver`'s descriptors, and a pipe that gets a byte now and then; the
    arguments are a `LayerWork`'s."""
    *blob_fds, progress_fd = fds
    blob = blob_fds[0] if len(blob_fds) == 1 else Receiver(*blob_fds)
    asked = LayerWork.of(arguments)
    keep_freed_memory()
    set_batch_policy()
    os.set_blocking(progress_fd, False)

    def tick() -> None:
        try:
            os.write(progress_fd, b".")
        except BlockingIOError:  # nobody has read the last ones yet
            pass

    try:
        write_tar(blob, asked.folder, asked.diff_id, asked.limits, tick, jail.enter)
    except Error:
        raise
    except OSError as error:
        raise to_error(error, asked.folder, "decompressing a layer") from None
    return 0
