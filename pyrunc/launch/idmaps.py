"""The id maps of a new user namespace are written by whoever has rights over the ids outside: the
parent."""

from __future__ import annotations

from pyrunc.errors import KernelError
from pyrunc.kernel.fd import write_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.spec.model import IdMap


def write_maps(pid: int, uids: Sequence[IdMap], gids: Sequence[IdMap]) -> None:
    """Give the process's new user namespace its maps, once and for all (user_namespaces(7)). Raises
    KernelError."""
    for name, entries in (("gid_map", gids), ("uid_map", uids)):
        text = "".join(f"{e.container_id} {e.host_id} {e.size}\n" for e in entries)
        try:
            write_once(f"/proc/{pid}/{name}", text.encode())
        except OSError as error:
            raise KernelError.of(error, "write", f"{name} {text.split()}") from None
