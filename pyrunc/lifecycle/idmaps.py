"""User namespaces seen from outside: their id maps are written here, and mounts are mapped by them.

A mapped mount needs the descriptor of a user namespace that has the map. When no process of the container lives in one yet, a
child that only waits is born in a new one for the moment it takes to open it.
"""

from __future__ import annotations

import os

from pyrunc.abi.clone import CLONE_NEWUSER
from pyrunc.errors import KernelError
from pyrunc.kernel.namespace import open_namespace
from pyrunc.program import macros
from pyrunc.program.assemble import Assembler
from pyrunc.program.launch import launch
from pyrunc.program.model import PID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.spec.model import IdMap

SIGKILL = 9


def write_maps(pid: int, uids: Sequence[IdMap], gids: Sequence[IdMap]) -> None:
    """Give the process's new user namespace its maps, once and for all (user_namespaces(7)). Raises KernelError."""
    for name, entries in (("gid_map", gids), ("uid_map", uids)):
        text = "".join(f"{e.container_id} {e.host_id} {e.size}\n" for e in entries)
        try:
            descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise KernelError("write", f"{name} {text.split()}", error.errno or 0) from None


def open_user_namespace(uids: Sequence[IdMap], gids: Sequence[IdMap]) -> int:
    """A descriptor of a new user namespace with these maps; nobody lives in it. The caller closes it."""
    a = Assembler()
    macros.prologue(a)
    macros.fork_parent(a, CLONE_NEWUSER)
    a.wait()
    a.exit(0)
    running = launch(a.program())
    pid = 0
    try:
        pid = running.expect(PID).value
        write_maps(pid, uids, gids)
        return open_namespace(f"/proc/{pid}/ns/user", "user")
    finally:
        running.close()
        if pid:
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)
