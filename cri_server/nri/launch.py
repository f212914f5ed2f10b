"""Finds and starts the plugins of a folder: executables called `INDEX-NAME`, which get a socket as
descriptor 3."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SOCKET_FD = 3
GRACE_S = 2.0  # between SIGTERM, sent when the connection ends, and SIGKILL


@dataclass(frozen=True, slots=True)
class PluginProgram:
    """A plugin's executable and configuration."""

    path: Path
    index: str
    name: str
    config: str


def find(folder: Path, configurations: Path) -> list[PluginProgram]:
    """Return the plugins in `folder` in order of their indices. Logs and skips executables whose
    name is not INDEX-NAME, or that users other than root can write. Returns no plugin if such users
    can write to `folder` itself."""
    programs = []
    try:
        entries = sorted(folder.iterdir())
        # A user who can write to the folder can replace an executable in it, which runs as root.
        if _others_write(folder):
            log.error("NRI: no plugin is started: users other than root can write to %s", folder)
            return []
    except FileNotFoundError:
        return []
    except OSError as error:
        log.error("NRI: cannot read the plugin folder %s: %s", folder, error.strerror)
        return []
    for path in entries:
        if not path.is_file() or not os.access(path, os.X_OK):
            continue
        index, dash, name = path.name.partition("-")
        if not (len(index) == 2 and index.isascii() and index.isdigit() and dash and name):
            log.error(
                "NRI: %s is not a plugin: its name must be INDEX-NAME with an index of two digits",
                path,
            )
            continue
        if _others_write(path):
            log.error("NRI: %s is not started: users other than root can write to it", path)
            continue
        programs.append(
            PluginProgram(path, index, name, _configuration(configurations, index, name))
        )
    return programs


def _others_write(path: Path) -> bool:
    status = path.stat()
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022)


def _configuration(folder: Path, index: str, name: str) -> str:
    # The Go module looks for the name with its index first, too (getPluginConfig).
    for file in (folder / f"{index}-{name}.conf", folder / f"{name}.conf"):
        try:
            return file.read_text()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            log.error("NRI: cannot read the plugin configuration %s: %s", file, error)
    return ""


class PluginProcess:
    """A plugin's process, a child of the server; its pidfd reports the exit."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.ended = asyncio.Event()
        self._kill: asyncio.TimerHandle | None = None
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @classmethod
    def start(cls, program: PluginProgram) -> tuple[PluginProcess, socket.socket]:
        """Start the plugin; return the process and the server's end of its socket. Raises
        OSError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            with theirs, open(os.devnull, "rb") as nothing:
                pid = os.posix_spawn(
                    program.path,
                    [str(program.path)],
                    {
                        "NRI_PLUGIN_NAME": program.name,
                        "NRI_PLUGIN_IDX": program.index,
                        "NRI_PLUGIN_SOCKET": str(SOCKET_FD),
                        "PATH": os.environ.get("PATH", os.defpath),
                    },
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                        (os.POSIX_SPAWN_DUP2, theirs.fileno(), SOCKET_FD),
                    ],
                    # A new process group: ^C at the server's terminal must not end the plugin.
                    setpgroup=0,
                    setsigmask=[],
                    setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
                )
            launched = cls(pid)
            undo.pop_all()
        return launched, ours

    def end_soon(self) -> None:
        """Send SIGTERM without waiting; SIGKILL follows after `GRACE_S` if the process still
        runs."""
        if not self.ended.is_set() and self._kill is None:
            self._signal(signal.SIGTERM)
            loop = asyncio.get_running_loop()
            self._kill = loop.call_later(GRACE_S, self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._kill is not None:
            self._kill.cancel()
        os.close(self._pidfd)
        # waitpid(2) does not block: a pidfd is readable once the process has ended (pidfd_open(2)).
        os.waitpid(self._pid, 0)
        self.ended.set()
