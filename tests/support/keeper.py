"""Ends the keeper of a state folder: a process that outlives the server that started it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from pyrunc.keeper.client import LOCK
from tests.support.processes import wait_until


def keeper_pid(folder: Path) -> int:
    """Return the pid of the state folder's keeper; 0 when none runs."""
    try:
        pid = int((folder / LOCK).read_text())
        comm = Path(f"/proc/{pid}/comm").read_text()
    except (OSError, ValueError):
        return 0
    return pid if comm == "pyrunc-keeper\n" and not is_gone(pid) else 0


def end_keeper(folder: Path, number: int = signal.SIGTERM) -> None:
    """Signal the state folder's keeper, if there is one, and wait for its end."""
    pid = keeper_pid(folder)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        assert wait_until(lambda: is_gone(pid), 30)


def is_gone(pid: int) -> bool:
    """Return whether the process has ended; also True for a zombie."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
