"""The host paths of a container's binds are open before its launch is compiled.

Those that the caller asks for are opened when CreateContainer looks them up. What CDI and plugins
add comes later; after a restart of the server, or when a launch was lost, all are opened again, by
the container's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cri_server.services import Services
from cri_server.spec import host_binds
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.sources import in_time


async def open_all(
    services: Services, folder: Path, opened: OpenSources, binds: Sequence[HostBind] | None
) -> Sequence[HostBind]:
    """Open what is not open, in a thread with a deadline. `binds`: None, where only the files in
    the container's folder know them. Raises DeadlineExceeded naming the path, KernelError,
    DamagedRecord, InvalidSpec."""
    timeout_s = services.config.containers.foreign_path_timeout_s
    if binds is None:
        own = own_folders(services)
        return await in_time(timeout_s, opened.subject, _read_and_open, folder, own, opened)
    missing = [bind for bind in binds if bind.source not in opened.fds]
    if missing:
        await in_time(timeout_s, opened.subject, _open, missing, opened)
    return binds


def descriptors(binds: Sequence[HostBind], opened: OpenSources) -> dict[str, int]:
    """Those that the shim needs: what the container's process opens itself needs none."""
    return {
        bind.source: opened.fds[bind.source]
        for bind in binds
        if not (bind.made_inside and opened.known[bind.source].is_in_every_namespace)
    }


def own_folders(services: Services) -> tuple[str, str]:
    return str(services.paths.root), str(services.paths.state)


def _read_and_open(folder: Path, own: tuple[str, str], opened: OpenSources) -> list[HostBind]:
    binds = host_binds.read(folder, own)
    _open(binds, opened)
    return binds


def _open(binds: Sequence[HostBind], opened: OpenSources) -> None:
    for bind in binds:
        opened.open(bind.source, bind.destination, links=bind.links)
