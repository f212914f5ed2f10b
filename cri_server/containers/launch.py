"""A container's launch: the pod's shim compiles it when the container is created, and carries it
out when it is started.

What is wrong with the container is reported at its creation, and little is left to do at the start.
A launch is derived from what is on disk: one that was lost with its shim, or whose cgroup is gone
since, is made again by the start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from cri_server.containers import host_paths
from cri_server.observability.timeline.trace import graft, span
from cri_server.pod import orphans
from cri_server.pod.client import Outside
from cri_server.pod.processes import ANSWER_S
from cri_server.services import Services
from cri_server.spec import groups
from cri_server.spec.host_binds import HostBind
from cri_server.spec.open_sources import OpenSources
from cri_server.store.model import Container, Sandbox
from pyrunc.cgroups.limits import CANNOT_SET, NOT_ON_THE_TREE
from pyrunc.errors import DeadlineExceeded, Error, Unsupported

TIMEOUT_S = 60.0


@contextlib.contextmanager
def limits_named(container: Container) -> Iterator[None]:
    """While inside, a limit that cannot be set is an error that names the container, and the
    setting that lets it go on without."""
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
    opened: OpenSources,
    binds: Sequence[HostBind] | None = None,
) -> None:
    """Have the shim make the launch, and with it the container's cgroup. `opened`: the host paths
    that are open; those of `binds` that are not are opened, and belong to it. A shim that does not
    answer in time is killed, and its pods go on in another one. Raises Error."""
    folder = services.paths.container_state(container.id)
    mounts = await services.images.mounts([container.image_id, *container.mounted_images.values()])
    binds = await host_paths.open_all(services, folder, opened, binds)
    outside = Outside(
        {mount.index: mount.fd for mount in mounts},
        opened.known,
        host_paths.descriptors(binds, opened),
    )
    client = services.shims.get(sandbox)
    created_in = sandbox.shim
    with span("compile"), limits_named(container):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                graft(await client.create_container(container.id, outside))
        except TimeoutError:
            if created_in is not None:
                orphans.kill_process(created_in)
            raise DeadlineExceeded(
                f"container {container.id}: compiling it took longer than {TIMEOUT_S:g} s"
            ) from None
    container.created_in = created_in
    container.has_cgroup = groups.place(container.cgroups_path, container.id).exists()


async def ensure(services: Services, sandbox: Sandbox, container: Container) -> None:
    """Make the launch again where the shim that had it, or its cgroup, is gone. Raises Error."""
    is_there = container.created_in is not None and container.created_in == sandbox.shim
    # Another runtime makes the cgroup at the start, and so does CRIU.
    if is_there and container.has_cgroup:
        is_there = groups.place(container.cgroups_path, container.id).exists()
    if not is_there:
        with OpenSources() as opened:
            await prepare(services, sandbox, container, opened)


async def drop(services: Services, container: Container) -> None:
    """Drop the launch of a container that is not going to be started as it is: its mounts go, and
    its cgroup. Does nothing to one that was started."""
    if container.process is not None:
        return
    container.created_in = None
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    client = services.shims.find(sandbox) if sandbox is not None else None
    if client is not None:
        # its shim was killed meanwhile, or is silent
        with contextlib.suppress(Error, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await client.drop_container(container.id)
    await orphans.kill_group(container.cgroups_path, container.id)
