"""A container's launch: made by a compiler when the container is created, carried out by the pod's shim when it is started.

What is wrong with the container is said then, and little is left to do at the start. A launch is derived from what is on disk:
one that is lost with this server, or does not fit any more since the limits were changed, is made again by the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from cri_server import orphans
from cri_server.containers import host_paths
from cri_server.services import Services
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.store.model import Container
from cri_server.timeline.trace import graft, span
from pyrunc.cgroups.limits import CANNOT_SET, NOT_ON_THE_TREE
from pyrunc.compiler.client import CompiledLaunch
from pyrunc.compiler.messages import CompiledContainer
from pyrunc.errors import Unsupported
from pyrunc.launch.sealed import cgroup_of

TIMEOUT_S = 60.0


@contextlib.contextmanager
def limits_named(container: Container) -> Iterator[None]:
    """While inside, a limit that cannot be set is an error that names the container, and the setting that lets it go on without."""
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
    container: Container,
    opened: OpenSources,
    binds: Sequence[HostBind] | None = None,
) -> None:
    """Make the launch, and with it the container's cgroup. `opened`: the host paths that are open; those of `binds` that are not are
    opened, and belong to it. Raises Error."""
    folder = services.paths.container_state(container.id)
    mounts = await services.images.mounts([container.image_id, *container.mounted_images.values()])
    images = {mount.index: mount.fd for mount in mounts}
    binds = await host_paths.open_all(services, folder, opened, binds)
    source_fds = host_paths.descriptors(binds, opened)
    with span("compile"), limits_named(container):
        container.launch = await services.compilers.container(
            container.id, str(folder), TIMEOUT_S, images, opened.known, source_fds
        )
        graft(container.launch.parts)


async def take(services: Services, container: Container) -> CompiledLaunch:
    """The launch, the caller's to close: the one that waits, or, where its cgroup is gone, another. Raises Error."""
    launch, container.launch = container.launch, None
    if launch is not None:
        # Another runtime makes the cgroup itself, and so does a restore.
        sealed = CompiledContainer.of(launch.compiled).launch
        group = sealed and cgroup_of(sealed)
        if not group or group.exists():
            return launch
        launch.close()
    with OpenSources() as opened:
        await prepare(services, container, opened)
    launch, container.launch = container.launch, None
    assert launch is not None
    return launch


async def drop(services: Services, container: Container) -> None:
    """The container is not going to be started as it is: its mounts go, and its cgroup."""
    launch, container.launch = container.launch, None
    if launch is not None:
        launch.close()
        await orphans.kill_group(container.cgroups_path, container.id)
