"""RemoveContainer: what runs is killed, then everything of the container goes, but never its log."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from cri_server.containers import launch, stop
from cri_server.observability import events
from cri_server.operations.steps import Beside, Step, Steps
from cri_server.pod import orphans
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Container
from pyrunc.errors import PeerError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Work:
    """A container that is being removed."""

    services: Services
    container: Container


async def remove(services: Services, reference: str) -> None:
    """Returns when neither lists nor status show the container. Unknown ids are fine."""
    container = services.index.containers.find(reference)
    if container is not None:
        await remove_container(services, container)


async def remove_container(services: Services, container: Container) -> None:
    """As `remove`, for a container at hand; repeated calls join."""
    await services.running.join(
        ("remove", container.id), lambda: STEPS.run(Work(services, container))
    )


async def kill(work: Work) -> None:
    await stop.kill(work.services, work.container)


async def tell_plugins(work: Work) -> None:
    await work.services.observer.remove_container(work.container)


async def leave_shim(work: Work) -> None:
    await launch.drop(work.services, work.container)
    sandbox = work.services.index.sandboxes.find(work.container.sandbox_id)
    client = work.services.shims.find(sandbox) if sandbox is not None else None
    try:
        if client is not None:
            async with asyncio.timeout(stop.SHIM_PATIENCE_S):
                await client.forget(work.container.id)
    except (PeerError, TimeoutError) as error:
        log.warning(
            "container %s: its shim was not told of the removal: %r", work.container.id, error
        )


async def remove_cgroup(work: Work) -> None:
    container = work.container
    if container.boot_id == work.services.node.boot_id:
        await orphans.kill_group(container.cgroups_path, container.id)


async def remove_record(work: Work) -> None:
    """From here on a restarted server finishes the removal by itself."""
    await disk.remove_container_record(work.services.paths, work.container)


async def remove_folders(work: Work) -> None:
    await disk.delete_container_folders(work.services.paths, work.services.trash, work.container.id)


async def forget(work: Work) -> None:
    services, container = work.services, work.container
    services.index.containers.remove(container)
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    if sandbox is not None:
        status.publish(services, sandbox, container.id, events.DELETED)


STEPS: Steps[Work] = Steps(
    "remove_container",
    [
        Step("kill", kill),
        Step("nri", tell_plugins),
        Beside((Step("shim", leave_shim), Step("cgroup", remove_cgroup))),
        Step("record", remove_record),
        Step("folders", remove_folders),
        Step("forget", forget),
    ],
)
