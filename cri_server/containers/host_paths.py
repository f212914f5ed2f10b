"""Opens the host paths of a container's binds before its launch is compiled.

CreateContainer opens the request's host paths when it looks them up, and later those that CDI and
NRI plugins add. After a restart of the server, or when a launch was lost, all paths are opened
again, as listed in the container's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cri_server.services import Services
from cri_server.spec import host_binds
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.sources import run_with_deadline


async def open_all(
    services: Services, folder: Path, open_sources: OpenSources, binds: Sequence[HostBind] | None
) -> Sequence[HostBind]:
    """Open the sources of `binds` that `open_sources` lacks, in a thread with a deadline, and
    return the binds. If `binds` is None, read them from the files in the container's `folder`.

    Raises DeadlineExceeded naming the path, KernelError, DamagedRecord, InvalidSpec.
    """
    timeout_s = services.config.containers.foreign_path_timeout_s
    if binds is None:
        own_prefixes = own_folders(services)
        return await run_with_deadline(
            timeout_s, open_sources.subject, _read_and_open, folder, own_prefixes, open_sources
        )
    missing = [bind for bind in binds if bind.source not in open_sources.fds]
    if missing:
        await run_with_deadline(timeout_s, open_sources.subject, _open, missing, open_sources)
    return binds


def descriptors(binds: Sequence[HostBind], open_sources: OpenSources) -> dict[str, int]:
    """Return the descriptors that the shim needs, by path. Paths that the container's process can
    open itself are left out."""
    return {
        bind.source: open_sources.fds[bind.source]
        for bind in binds
        if not (bind.made_inside and open_sources.facts[bind.source].is_in_every_namespace)
    }


def own_folders(services: Services) -> tuple[str, str]:
    """Return the server's root and state directories. Sources of binds below them are the server's
    own files, not host paths of the request."""
    return str(services.paths.root), str(services.paths.state)


def _read_and_open(
    folder: Path, own_prefixes: tuple[str, str], open_sources: OpenSources
) -> list[HostBind]:
    binds = host_binds.read(folder, own_prefixes)
    _open(binds, open_sources)
    return binds


def _open(binds: Sequence[HostBind], open_sources: OpenSources) -> None:
    for bind in binds:
        open_sources.open(bind.source, bind.destination, links=bind.links)
