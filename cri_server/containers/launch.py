"""Prepares a container's launch (all data that its process needs to start): opens the host paths of
its bind mounts, and has the shim compile the launch at CreateContainer. The shim carries the launch
out at StartContainer.

So CreateContainer reports the errors of the configuration, and little work is left for the start. A
launch is derived from files on disk. The start compiles it again if the container's cgroup, or the
shim that compiled it before, is gone.

CreateContainer opens the request's host paths when it looks them up. `prepare` opens those that CDI
and NRI plugins add. When the start compiles a launch again, `prepare` opens all paths again, as
listed in the container's files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cri_server.pod import orphans
from cri_server.services import Services
from cri_server.spec import host_binds
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.spec.sources import run_with_deadline
from cri_server.store.model import Container, Sandbox
from pyrunc.cgroups.limits import CANNOT_SET, NOT_ON_THE_TREE
from pyrunc.errors import Unsupported
from pyrunc.shim import messages


@contextlib.contextmanager
def limit_errors(container: Container) -> Iterator[None]:
    """Add the container's name to those errors of the `with` block that say that a limit cannot be
    set. If the cause is a missing cgroup controller, also name the configuration key that lets
    containers start without the limit."""
    try:
        yield
    except Unsupported as error:
        if not error.message.startswith(CANNOT_SET):
            raise
        text = f"container {container.config.metadata.name}: {error.message}"
        if NOT_ON_THE_TREE in error.message:
            text += '; with [cgroup] missing_controllers = "warn" it runs without that limit'
        raise Unsupported(text) from None


async def prepare(
    services: Services,
    sandbox: Sandbox,
    container: Container,
    open_sources: OpenSources,
    binds: Sequence[HostBind] | None = None,
) -> None:
    """Have the shim compile the container's launch and make the container's cgroup. `open_sources`:
    the host paths that are open already. This function opens the other sources of `binds`, and adds
    them to `open_sources`. A shim that does not answer in time is killed, and another shim takes
    over its pods. Raises Error."""
    folder = services.paths.container_state(container.id)
    mounted = await services.images.mounts([container.image_id, *container.mounted_images.values()])
    binds = await _open_all(services, folder, open_sources, binds)
    images = {mount.index: mount.fd for mount in mounted}
    source_fds = _descriptors(binds, open_sources)
    request = messages.CreateContainer(
        container.id,
        images=list(images),
        sources=dict(open_sources.facts),
        opened=list(source_fds),
    )
    fds = [*images.values(), *source_fds.values()]
    with limit_errors(container):
        await services.pod(sandbox).create(container, request, fds)


async def ensure(services: Services, sandbox: Sandbox, container: Container) -> None:
    """Compile the container's launch again if the shim that compiled it, or the container's cgroup,
    is gone. Raises Error."""
    if not services.pod(sandbox).is_created(container):
        with OpenSources() as open_sources:
            await prepare(services, sandbox, container, open_sources)


async def drop(services: Services, container: Container) -> None:
    """Undo `prepare`: have the shim discard the container's compiled launch, and remove the
    container's cgroup. Does nothing once the container has been started. Errors are logged or
    ignored."""
    pod = services.pod_of(container)
    if pod is not None:
        await pod.drop(container)
    elif container.process is None:
        await orphans.kill_group(container.cgroups_path, container.id)


def own_folders(services: Services) -> tuple[str, str]:
    """Return the server's root and state directories. A bind's source below one of them is a file
    of the server, not a host path of the request."""
    return str(services.paths.root), str(services.paths.state)


async def _open_all(
    services: Services, folder: Path, open_sources: OpenSources, binds: Sequence[HostBind] | None
) -> Sequence[HostBind]:
    """Open those sources of `binds` that are not yet in `open_sources`, in a thread with a
    deadline, and return the binds. If `binds` is None, read them from the files in the container's
    `folder`.

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


def _descriptors(binds: Sequence[HostBind], open_sources: OpenSources) -> dict[str, int]:
    """Return the descriptors that the shim needs, by path. Paths that the container's process can
    open itself are left out."""
    return {
        bind.source: open_sources.fds[bind.source]
        for bind in binds
        if not (bind.made_inside and open_sources.facts[bind.source].is_in_every_namespace)
    }


def _read_and_open(
    folder: Path, own_prefixes: tuple[str, str], open_sources: OpenSources
) -> list[HostBind]:
    binds = host_binds.read(folder, own_prefixes)
    _open(binds, open_sources)
    return binds


def _open(binds: Sequence[HostBind], open_sources: OpenSources) -> None:
    for bind in binds:
        open_sources.open(bind.source, bind.destination, links=bind.links)
