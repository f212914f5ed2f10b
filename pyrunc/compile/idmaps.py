"""Reads the id maps of user namespaces, and opens a user namespace for idmapped mounts.

An idmapped mount needs the descriptor of a user namespace with the mount's id map. If there is no
such namespace, a waiting child is cloned into a new one and killed once the namespace is open.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWUSER
from pyrunc.errors import kernel_errors
from pyrunc.kernel.credential import id_map
from pyrunc.kernel.namespace import open_namespace
from pyrunc.launch.idmaps import write_maps
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import launch
from pyrunc.program.model import PID
from pyrunc.spec.model import IdMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Maps = tuple[tuple[IdMap, ...], tuple[IdMap, ...]]

SIGKILL = 9


def maps_of_process(pid: int) -> Maps:
    """Return the uid and gid maps of the user namespace of a process, as we see them. Raises
    KernelError."""
    return _read_map(pid, "uid_map"), _read_map(pid, "gid_map")


def maps_of_namespace(path: str, namespace_fd: int) -> Maps:
    """Return the uid and gid maps of the user namespace behind `namespace_fd`. Raises KernelError.

    If `path` is /proc/PID/ns/user and process PID is still in the namespace, the maps are read from
    this process. Otherwise they are read from a child that enters the namespace.
    """
    parts = path.split("/")
    if parts[:2] == ["", "proc"] and parts[3:] == ["ns", "user"] and parts[2].isdigit():
        maps = maps_of_process(int(parts[2]))
        # Compared after the maps were read: by now the pid may be another process's.
        if os.stat(path).st_ino == os.fstat(namespace_fd).st_ino:
            return maps
    a = Assembler()
    macros.prologue(a)
    a.sys("setns", 3, CLONE_NEWUSER)
    with _WaitingProcess(a, 0, {3: namespace_fd}) as pid:
        return maps_of_process(pid)


def _read_map(pid: int, name: str) -> tuple[IdMap, ...]:
    path = f"/proc/{pid}/{name}"
    with kernel_errors("open", f"'{path}'"):
        return tuple([IdMap(*row) for row in id_map(path)])


def open_user_namespace(uids: Sequence[IdMap], gids: Sequence[IdMap]) -> int:
    """Open a new user namespace with these maps, without a process in it. The caller closes it."""
    a = Assembler()
    macros.prologue(a)
    with _WaitingProcess(a, CLONE_NEWUSER) as pid:
        # The maps are written through /proc/PID of a process in the namespace (user_namespaces(7)),
        # so a process must live there until then.
        write_maps(pid, uids, gids)
        return open_namespace(f"/proc/{pid}/ns/user", "user")


class _WaitingProcess:
    """A context manager around a child that only waits. Entering returns the child's pid, leaving
    kills and reaps the child.

    - `a`: the instructions that the launcher runs before it clones the child
    - `fds`: the launcher's descriptors, as number in the launcher -> our number
    - `flags`: the child's new namespaces (CLONE_NEW…)
    """

    def __init__(self, a: Assembler, flags: int, fds: Mapping[int, int] = {}) -> None:
        macros.fork_parent(a, flags)
        a.wait()
        a.exit(0)
        self._running, self._pid = launch(a.program(), fds=fds), 0

    def __enter__(self) -> int:
        try:
            self._pid = self._running.expect(PID).value
        except BaseException:
            self.__exit__()
            raise
        return self._pid

    def __exit__(self, *_: object) -> None:
        self._running.close()
        if self._pid:
            # By pid: it is our own child and not reaped yet, so the number is still its own.
            os.kill(self._pid, SIGKILL)
            os.waitpid(self._pid, 0)
