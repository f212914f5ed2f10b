"""Writes the id maps of a new user namespace. The parent writes them: the kernel requires rights
over the outer ids, and the new process does not have these."""

from __future__ import annotations

from pyrunc.errors import kernel_errors
from pyrunc.kernel.fd import write_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.spec.model import IdMap


def write_maps(pid: int, uids: Sequence[IdMap], gids: Sequence[IdMap]) -> None:
    """Write the id maps of the process's new user namespace. Each map can be written only once
    (user_namespaces(7)). Raises KernelError."""
    # In one write(2) each: the kernel takes a whole map once, and a second write is EPERM
    # (user_namespaces(7)).
    for name, entries in (("gid_map", gids), ("uid_map", uids)):
        text = "".join(f"{e.container_id} {e.host_id} {e.size}\n" for e in entries)
        with kernel_errors("write", f"{name} {text.split()}"):
            write_once(f"/proc/{pid}/{name}", text.encode())
