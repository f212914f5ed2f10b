"""Helpers for attacks: processes that swap names, slow system calls, and checks that the host is
unchanged.

Races do not depend on luck. `slowly` runs the runtime under strace, which pauses it before each of
the calls that the attack aims at, while `Swapping` exchanges two names continuously: a name that
was looked up before the pause leads elsewhere after it, in every round.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.system.harness import Result, Runtime

IN_OPEN, IN_EVERYTHING = 0x20, 0xFFF  # all of IN_ACCESS … IN_MOVE_SELF
SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
            "/proc/sys/net/ipv4/ip_forward", "/proc/sys/kernel/shmmax",
            "/proc/sys/vm/overcommit_memory",
            "/proc/sys/kernel/modprobe", "/proc/sys/kernel/sysrq")  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


class Canary:
    """A folder with the files `ptmx` and `passwd`; `is_untouched` fails if one of them was even
    opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "ptmx").write_text("canary")
        (path / "passwd").write_text("canary\n")
        self._expected = self._look()
        self._watch = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for watched in (path, path / "ptmx", path / "passwd"):
            assert _libc.inotify_add_watch(self._watch, bytes(watched), IN_EVERYTHING) > 0

    def _look(self) -> dict[str, tuple[int, int, int, int]]:
        stats = {}
        for entry in [self.path, *sorted(self.path.rglob("*"))]:
            status = entry.lstat()
            stats[str(entry)] = (status.st_ino, status.st_mode, status.st_uid, status.st_size)
        return stats

    def is_untouched(self) -> None:
        """Check that the folder has the same entries as at the beginning, and that inotify has
        reported no event since then."""
        try:
            events = os.read(self._watch, 65536)
        except BlockingIOError:
            events = b""
        assert self._look() == self._expected, sorted(self._look())
        assert not events, f"{len(events)} bytes of inotify events: a file was opened"

    def close(self) -> None:
        os.close(self._watch)

    @staticmethod
    def watch(files: Iterable[Path]) -> int:
        """Return an inotify descriptor that records each open of these files; `seen` reads and
        closes it."""
        number = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        for file in files:
            assert _libc.inotify_add_watch(number, bytes(file), IN_OPEN) > 0
        return number

    @staticmethod
    def seen(number: int) -> bytes:
        try:
            return os.read(number, 65536)
        except BlockingIOError:
            return b""
        finally:
            os.close(number)


class Outside:
    """A snapshot of sysctls and of /dev/null of the host, which a container could damage."""

    def __init__(self) -> None:
        # The ledger compares mounts.
        self.facts: dict[str, Any] = {
            name: Path(name).read_text() for name in SETTINGS if Path(name).exists()
        }
        null = os.stat("/dev/null")
        self.facts["null"] = (null.st_mode, null.st_rdev, null.st_uid, null.st_ino)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outside) and self.facts == other.facts

    def __repr__(self) -> str:
        return repr(self.facts)


class Swapping:
    """Exchanges the names `first` and `second` continuously during the `with` block; `count` is the
    number of exchanges."""

    def __init__(self, probe: Path, first: Path, second: Path, pause_us: int = 0) -> None:
        self.command = [str(probe), "swap", str(first), str(second), str(pause_us)]
        self.count = 0

    def __enter__(self) -> Swapping:
        self._child = subprocess.Popen(self.command, stdout=subprocess.PIPE)
        assert self._child.stdout is not None and self._child.stdout.readline() == b"swapping\n"
        return self

    def __exit__(self, *error: object) -> None:
        self._child.send_signal(signal.SIGTERM)
        out, _ = self._child.communicate(timeout=60)
        self.count = int(out)


def slowly(runtime: Runtime, calls: Sequence[str], delay_ms: float = 2.0) -> Runtime:
    """Return the same runtime under strace, which pauses all its processes at the entry of each of
    the system calls `calls`."""
    slow = Runtime(runtime.folder, runtime.rootfs)
    slow.ids = runtime.ids
    names = ",".join(calls)
    slow.program = [
        *("strace", "-f", "-qqq", "-o", "/dev/null", "-e", f"trace={names}"),
        *("-e", f"inject={names}:delay_enter={int(delay_ms * 1000)}", *runtime.program),
    ]
    return slow


def traced(runtime: Runtime, log: Path, calls: str) -> Runtime:
    """Return the same runtime under strace, which writes the system calls `calls` of all its
    processes to `log`."""
    watched = Runtime(runtime.folder, runtime.rootfs)
    watched.ids = runtime.ids
    watched.program = [
        "strace",
        "-f",
        "-qqq",
        "-y",
        "-s",
        "256",
        "-o",
        str(log),
        "-e",
        f"trace={calls}",
        *runtime.program,
    ]
    return watched


def mount(destination: str, kind: str = "tmpfs", source: str = "", *options: str) -> dict[str, Any]:
    """Return an entry of a configuration's `mounts`."""
    return {
        "destination": destination,
        "type": kind,
        "source": source or kind,
        "options": list(options),
    }


def bind(source: Path | str, destination: str, *options: str) -> dict[str, Any]:
    """Return an entry of `mounts` that is a bind."""
    return mount(destination, "bind", str(source), "rbind", *options)


def refused(result: Result, *words: str) -> None:
    """Check that the command failed with a message that contains one of the words."""
    assert result.code != 0, result
    assert not words or any(word in result.err for word in words), result
