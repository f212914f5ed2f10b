"""How processes have ended that are not, or will not be, children of this shim: the keeper's records, and what the kernel tells."""

from __future__ import annotations

from pyrunc.errors import Error
from pyrunc.keeper.client import Keeper
from pyrunc.kernel.process import wait_status

TIMEOUT_S = 0.5


class Exits:
    """Of the keeper in `folder`, if there is one; without it only a kernel from Linux 6.15 on knows of what others have reaped."""

    def __init__(self, folder: str | None) -> None:
        self._keeper = None if folder is None else Keeper(folder, TIMEOUT_S)

    def status(self, pid: int, start_time: int, pidfd: int) -> int | None:
        """How a process that is no child of ours has ended, as of wait(2). None: it runs, or that is not known."""
        status = wait_status(pid, start_time, pidfd)
        if status is None and self._keeper is not None:
            try:
                record = self._keeper.exit_of(pid, start_time)
            except Error:
                return None
            status = None if record is None else record.status
        return status

    def note(self, pid: int, start_time: int, status: int) -> None:
        """For the shim after this one, should it be killed before it has written this down."""
        if self._keeper is not None:
            try:
                self._keeper.note(pid, start_time, status)
            except Error:  # the kernel may tell
                pass
