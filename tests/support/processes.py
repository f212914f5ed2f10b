"""Starts and ends programs for tests and `make kube`: by pid, never by name, with a log file
each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ENDED = -1


class Program:
    """A long-running program in its own session; `folder/name.pid` lets another process end it
    later."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.log, self._pid_file = name, folder / f"{name}.log", folder / f"{name}.pid"
        self._child: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `command` with output appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | dict(environment or {}),
            )  # fmt: skip
        self._pid_file.write_text(f"{self._child.pid} {_start_time(self._child.pid)}")

    @property
    def pid(self) -> int:
        """Return the pid of the running program; 0 when it does not run."""
        try:
            pid, started = map(int, self._pid_file.read_text().split())
        except FileNotFoundError:
            return 0
        if self._child is not None and self._child.poll() is not None:
            return 0
        return pid if _start_time(pid) == started != _ENDED else 0

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 10.0) -> None:
        """Send the signal `how` and wait; SIGKILL when the program does not end."""
        for number in (how, signal.SIGKILL):
            pid = self.pid
            if not pid:
                break
            with contextlib.suppress(ProcessLookupError):  # the program may end by itself
                os.kill(pid, number)
            if wait_until(lambda: not self.pid, timeout_s, every_s=0.005):
                break
        if self._child is not None:
            self._child.wait()
        self._pid_file.unlink(missing_ok=True)

    def tail(self, lines: int = 30) -> str:
        """Return the end of the log, for messages."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def clean_up_on_signals() -> None:
    """Make SIGINT and SIGTERM raise an exception, so that this process cleans up before it ends."""
    # A shell without job control starts background processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def installed(program: str) -> list[str]:
    """Return the command line of one of the project's programs: the script beside this interpreter,
    or its module if none is installed."""
    script = Path(sys.executable).parent / program
    module = {"pyrunc": "pyrunc.cli.main", "pyrunc-cri": "cri_server.cli.main"}[program]
    return [str(script)] if script.exists() else [sys.executable, "-m", module]


def wait_until(condition: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> bool:
    """Wait until `condition()` is true; return False when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _start_time(pid: int) -> int:
    """Return field 22 of /proc/PID/stat, or `_ENDED` for a process that has ended or is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return _ENDED
    state, *rest = fields[fields.rindex(")") + 2 :].split()
    return _ENDED if state in "ZX" else int(rest[18])


def comm(pid: int) -> str:
    """Return the name of a process (proc_pid_comm(5))."""
    return Path(f"/proc/{pid}/comm").read_text().strip()
