"""A container's log file. Whole lines are appended, and the file is reopened on request. An error
of the file never stops the reading of the container's output.

When a write fails in the middle of a line, for example on a full disk, the written part is cut off
again. So the file always ends with a whole line. Lines that cannot be written, or whose file cannot
be opened, wait in memory for the next attempt, up to `PENDING_LIMIT_BYTES`. Further lines are
dropped and counted. When there is room again, a line in the log says how many bytes were lost.
"""

from __future__ import annotations

import os

from pyrunc.errors import KernelError
from pyrunc.kernel.path import open_folder_at
from pyrunc.shim.log_lines import time_stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PENDING_LIMIT_BYTES = 1024 * 1024
LOG_NOTE = "the container's log"
FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class LogFile:
    """A container's log file. `open` or the first line opens it. Without a path, all lines are
    discarded."""

    __slots__ = (
        "_closed",
        "_fd",
        "_on_waiting",
        "_pending",
        "_reason",
        "directory",
        "dropped_bytes",
        "path",
    )

    def __init__(
        self, path: str | None, on_waiting: Callable[[], None] | None = None, directory: str = ""
    ) -> None:
        """Prepare to append to `path`; a missing file and its missing folders will be made.

        - `on_waiting()`: is called when lines could not be written. The caller must then call
          `retry` from time to time.
        - `directory`: the pod's log folder, as for `open_log`
        """
        self.path, self.directory = path, directory
        self._on_waiting = on_waiting
        self.dropped_bytes = 0
        self._pending = bytearray()
        self._reason = ""
        self._fd, self._closed = -1, path is None

    @property
    def waiting(self) -> bool:
        """Return whether there are lines that `retry` should write, because they could not be
        written yet."""
        return bool(self._pending or self.dropped_bytes) and not self._closed

    def write(self, records: bytes) -> None:
        """Append whole log lines."""
        if self._closed or not records:
            return
        if self.waiting and not self.retry():
            self._store_pending(records)
        else:
            self._pending += records[self._append(records) :]
            if self._pending and self._on_waiting:
                self._on_waiting()

    def retry(self) -> bool:
        """Write the waiting log lines; return whether all are written."""
        if self._closed:
            return True
        if self._pending:
            del self._pending[: self._append(self._pending)]
        if self.dropped_bytes and not self._pending:
            note = b"%b stderr F pyrunc: %d bytes of log were lost: %b\n"
            if self._append(note % (time_stamp(), self.dropped_bytes, self._reason.encode())):
                self.dropped_bytes = 0
        return not self.waiting

    def open(self) -> None:
        """Open the file at the log's path, or reopen it after a rotation; later lines go to the
        new file. Raises KernelError if that fails; lines then go to the old file, or wait in memory
        if no file was open."""
        if self.path is None:
            return
        fresh = open_log(self.path, self.directory)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fresh
        if self.waiting:
            self.retry()

    def close(self) -> None:
        """Close the file for good. Lines that wait are lost."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._closed = -1, True

    def _append(self, records: bytes | bytearray) -> int:
        """Append lines; return how many bytes of whole lines were written."""
        written = 0
        try:
            if self._fd < 0:
                assert self.path is not None
                self._fd = open_log(self.path, self.directory)
            with memoryview(records) as view:
                while written < len(records):
                    written += os.write(self._fd, view[written:])
        except (KernelError, OSError) as error:
            self._reason = os.strerror(error.errno or 0)
        if written == len(records):
            return written
        whole = records.rfind(b"\n", 0, written) + 1
        self._cut_off(written - whole)
        return whole

    def _cut_off(self, torn_bytes: int) -> None:
        """Remove the last `torn_bytes` bytes of the file: the beginning of a line that could not be
        written to its end. Does nothing if the log is not a regular file."""
        try:
            # The next record begins at the new end without lseek(2), because of O_APPEND (open(2)).
            size = os.fstat(self._fd).st_size
            if 0 < torn_bytes <= size:
                os.ftruncate(self._fd, size - torn_bytes)
        except OSError:  # not a regular file: nothing can be taken back
            pass

    def _store_pending(self, records: bytes) -> None:
        if len(self._pending) + len(records) <= PENDING_LIMIT_BYTES and not self.dropped_bytes:
            self._pending += records
        else:  # from the first loss on, so that the waiting records have no gap
            self.dropped_bytes += len(records)


def open_log(path: str, directory: str = "") -> int:
    """Open `path` for appending; return the descriptor. A missing file is made with mode 0640,
    missing folders with 0755. Raises KernelError.

    It is an error if the pod's log folder `directory`, a folder below it or the file is a symbolic
    link. Through such a link, a pod that may write to the node's logs could make any file of the
    host grow.
    """
    above, name = os.path.split(path)
    top = directory.rstrip("/") or above
    try:
        os.makedirs(top, mode=0o755, exist_ok=True)
        folder = os.open(top, FOLDER | os.O_NOFOLLOW if directory else FOLDER)
        try:
            for part in os.path.relpath(above, top).split("/"):
                below = open_folder_at(folder, part)
                os.close(folder)
                folder = below
            # O_APPEND: a tool that truncates the file in place leaves no hole. O_NONBLOCK: a FIFO
            # without a reader gives ENXIO instead of stopping the only thread (fifo(7)). O_NOCTTY:
            # the shim leads a session, and a terminal would become its controlling one.
            flags = (
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
            )
            return os.open(name, flags | os.O_NOFOLLOW, 0o640, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise KernelError("open", repr(path), error.errno or 0, LOG_NOTE) from None
