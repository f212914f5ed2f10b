"""RemoveContainer: kills the container's processes, then removes its cgroup, record and folders.
Does not delete its log."""

from __future__ import annotations

from dataclasses import dataclass

from cri_server.containers import stop
from cri_server.observability import events
from cri_server.operations.steps import Parallel, Step, Steps
from cri_server.pod import orphans
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Container


@dataclass(slots=True)
class RemoveContainerContext:
    """A container that is being removed."""

    services: Services
    container: Container


async def remove(services: Services, reference: str) -> None:
    """Remove a container. Returns when neither lists nor status calls show the container. Does
    nothing for an unknown id."""
    container = services.index.containers.find(reference)
    if container is not None:
        await remove_container(services, container)


async def remove_container(services: Services, container: Container) -> None:
    """Remove `container`. Returns when neither lists nor status calls show the container.
    Concurrent calls wait for the same removal."""
    await services.running.join(
        ("remove", container.id), lambda: STEPS.run(RemoveContainerContext(services, container))
    )


async def kill(context: RemoveContainerContext) -> None:
    await stop.kill(context.services, context.container)


async def notify_plugins(context: RemoveContainerContext) -> None:
    await context.services.observer.remove_container(context.container)


async def drop_from_shim(context: RemoveContainerContext) -> None:
    pod = context.services.pod_of(context.container)
    if pod is not None:
        await pod.remove(context.container)


async def remove_cgroup(context: RemoveContainerContext) -> None:
    container = context.container
    if container.boot_id == context.services.node.boot_id:
        await orphans.kill_group(container.cgroups_path, container.id)


async def remove_files(context: RemoveContainerContext) -> None:
    """Remove the record, then the folders. If the server dies in between, its next start completes
    the removal."""
    services = context.services
    await disk.remove_container(services.paths, services.trash, context.container)


async def remove_from_index(context: RemoveContainerContext) -> None:
    services, container = context.services, context.container
    services.index.containers.remove(container)
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    if sandbox is not None:
        status.publish(services, sandbox, container.id, events.DELETED)


STEPS: Steps[RemoveContainerContext] = Steps(
    "remove_container",
    [
        Step("kill", kill),
        Step("nri", notify_plugins),
        Parallel((Step("shim", drop_from_shim), Step("cgroup", remove_cgroup))),
        Step("files", remove_files),
        # Last: a container whose removal has failed stays listed, so that kubelet repeats the call.
        Step("forget", remove_from_index),
    ],
)
