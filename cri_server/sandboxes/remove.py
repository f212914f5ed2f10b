"""RemovePodSandbox: stop, remove the containers, then forget the sandbox. Logs and the host's files
stay."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cri_server.containers import remove as container_remove
from cri_server.observability import events
from cri_server.operations.steps import Step, Steps
from cri_server.pod import orphans
from cri_server.sandboxes.stop import stop_sandbox
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Sandbox


@dataclass(slots=True)
class Work:
    """A sandbox that is being removed."""

    services: Services
    sandbox: Sandbox


async def remove(services: Services, reference: str) -> None:
    """Returns when neither lists nor status show the sandbox. Unknown ids are fine; call again
    after an error."""
    sandbox = services.index.sandboxes.find(reference)
    if sandbox is not None:
        await services.running.join(
            ("remove", sandbox.id), lambda: STEPS.run(Work(services, sandbox))
        )


async def stop(work: Work) -> None:
    await stop_sandbox(work.services, work.sandbox)


async def remove_containers(work: Work) -> None:
    containers = work.services.index.containers_of(work.sandbox)
    await asyncio.gather(*(container_remove.remove_container(work.services, c) for c in containers))


async def tell_plugins(work: Work) -> None:
    await work.services.observer.remove_pod(work.sandbox)


async def forget_network(work: Work) -> None:
    """After a stop that could not reach the network, or a record that was never written."""
    if not work.sandbox.host_network:
        await work.services.network.detach(work.sandbox.id, None)


async def remove_cgroup(work: Work) -> None:
    if work.sandbox.boot_id == work.services.node.boot_id:
        await orphans.kill_group(work.sandbox.cgroups_path, work.sandbox.id)


async def remove_record(work: Work) -> None:
    await disk.remove_sandbox_record(work.services.paths, work.sandbox)


async def remove_state(work: Work) -> None:
    await disk.delete_sandbox_folders(work.services.paths, work.sandbox.id)


async def forget(work: Work) -> None:
    event = status.event(work.services, work.sandbox, work.sandbox.id, events.DELETED)
    work.services.index.sandboxes.remove(work.sandbox)
    if event is not None:
        work.services.events.publish(event)


STEPS: Steps[Work] = Steps(
    "remove_sandbox",
    [
        Step("stop", stop),
        Step("containers", remove_containers),
        Step("nri", tell_plugins),
        Step("network", forget_network),
        Step("cgroup", remove_cgroup),
        Step("record", remove_record),
        Step("state", remove_state),
        Step("forget", forget),
    ],
)
