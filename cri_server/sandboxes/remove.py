"""RemovePodSandbox: stops the pod, removes its containers, then the sandbox and its state. Does not
delete logs or files of host volumes."""

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
class RemoveSandboxContext:
    """A sandbox that is being removed."""

    services: Services
    sandbox: Sandbox


async def remove(services: Services, reference: str) -> None:
    """Remove a sandbox; return when neither lists nor status calls show it. Does nothing for an
    unknown id. After an error the caller may repeat the call."""
    sandbox = services.index.sandboxes.find(reference)
    if sandbox is not None:
        await services.running.join(
            ("remove", sandbox.id), lambda: STEPS.run(RemoveSandboxContext(services, sandbox))
        )


async def stop(context: RemoveSandboxContext) -> None:
    await stop_sandbox(context.services, context.sandbox)


async def remove_containers(context: RemoveSandboxContext) -> None:
    containers = context.services.index.containers_of(context.sandbox)
    await asyncio.gather(
        *(container_remove.remove_container(context.services, c) for c in containers)
    )


async def notify_plugins(context: RemoveSandboxContext) -> None:
    await context.services.observer.remove_pod(context.sandbox)


async def release_network(context: RemoveSandboxContext) -> None:
    """Detach the pod's network if StopPodSandbox could not. For a pod without a network record,
    remove only the bind mount that keeps its network namespace alive. Raises the errors of the CNI
    plugins."""
    if not context.sandbox.host_network:
        await context.services.network.detach(context.sandbox.id, None)


async def remove_cgroup(context: RemoveSandboxContext) -> None:
    if context.sandbox.boot_id == context.services.node.boot_id:
        await orphans.kill_group(context.sandbox.cgroups_path, context.sandbox.id)


async def remove_files(context: RemoveSandboxContext) -> None:
    services = context.services
    await disk.remove_sandbox(services.paths, services.trash, context.sandbox)


async def remove_from_index(context: RemoveSandboxContext) -> None:
    event = status.event(context.services, context.sandbox, context.sandbox.id, events.DELETED)
    context.services.index.sandboxes.remove(context.sandbox)
    if event is not None:
        context.services.events.publish(event)


STEPS: Steps[RemoveSandboxContext] = Steps(
    "remove_sandbox",
    [
        Step("stop", stop),
        Step("containers", remove_containers),
        Step("nri", notify_plugins),
        Step("network", release_network),
        Step("cgroup", remove_cgroup),
        Step("files", remove_files),
        # Last: a sandbox whose removal has failed stays listed, so that kubelet repeats the call.
        Step("forget", remove_from_index),
    ],
)
