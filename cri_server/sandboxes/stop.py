"""StopPodSandbox: the containers end, then the pause process, then the network; the sandbox stays
visible as not ready.

Every step may find its work done already: kubelet calls this many times, after reboots too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass

from cri_server.containers import launch
from cri_server.containers import stop as container_stop
from cri_server.containers.stop import SHIM_PATIENCE_S
from cri_server.operations.steps import Step, Steps
from cri_server.pod.orphans import kill_process
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Sandbox
from pyrunc.errors import Error, PeerError, WrongState

log = logging.getLogger(__name__)

START_PATIENCE_S = 5.0


async def release_network(services: Services, reference: str) -> list[str]:
    """Give up the network of a pod that StopPodSandbox could not detach; what its plugins refused,
    a line each.

    Raises NotFound, WrongState while the pod runs.
    """
    sandbox = services.index.sandboxes.get(reference)
    if sandbox.pause_alive:
        raise WrongState(f"sandbox {sandbox.id} runs: stop it first")
    if sandbox.host_network:
        return []
    refused = await services.network.release(sandbox.id, sandbox.netns_path or None)
    if sandbox.network == "attached":
        sandbox.network = "released"
    return refused


@dataclass(slots=True)
class Work:
    """A sandbox that is being stopped."""

    services: Services
    sandbox: Sandbox
    was_ready: bool


async def stop(services: Services, reference: str) -> None:
    """Returns when nothing of the pod runs and its address is free. Unknown ids are fine.

    Raises what the network's teardown raises; call again then.
    """
    sandbox = services.index.sandboxes.find(reference)
    if sandbox is not None:
        await stop_sandbox(services, sandbox)


async def stop_sandbox(services: Services, sandbox: Sandbox) -> None:
    """As `stop`, for a sandbox at hand; repeated calls join."""
    if _stopped(services, sandbox):
        return
    work = Work(services, sandbox, sandbox.phase == "ready" and sandbox.pause_alive)
    await services.running.join(("stop", sandbox.id), lambda: STEPS.run(work))


def _stopped(services: Services, sandbox: Sandbox) -> bool:
    return (
        sandbox.phase == "stopped"
        and sandbox.network != "attached"
        and services.shims.find(sandbox) is None
        and not services.shims.is_silent(sandbox)
        and not any(c.running for c in services.index.containers_of(sandbox))
    )


async def refuse_more(work: Work) -> None:
    """No container is created or started from here on; those that are being are waited for, and
    starts that take long are ended: a volume may not answer."""
    work.sandbox.phase = "stopping"
    try:
        async with asyncio.timeout(START_PATIENCE_S):
            await work.sandbox.gate.empty()
    except TimeoutError:
        await _end_starts(work)
        await work.sandbox.gate.empty()
    if work.services.shims.is_silent(work.sandbox):
        await work.services.shims.reach(work.sandbox)


async def _end_starts(work: Work) -> None:
    client = work.services.shims.find(work.sandbox)
    starting = [c for c in work.services.index.containers_of(work.sandbox) if c.starting]
    if client is None:
        return
    for container in starting:
        log.warning(
            "container %s: its start, which takes long, is ended: its pod is being stopped",
            container.id,
        )
        with contextlib.suppress(Error):  # it has ended meanwhile, or its shim
            await client.stop(container.id, signal.SIGKILL, 0.0)


async def end_containers(work: Work) -> None:
    living = [c for c in work.services.index.containers_of(work.sandbox) if c.exit is None]
    await asyncio.gather(*(container_stop.kill(work.services, c) for c in living))
    await asyncio.gather(*(launch.drop(work.services, c) for c in living))
    for container in living:
        await work.services.observer.stop_container(container)


async def tell_plugins(work: Work) -> None:
    """While the network is still there."""
    await work.services.observer.stop_pod(work.sandbox)


async def end_pause(work: Work) -> None:
    client = work.services.shims.find(work.sandbox)
    try:
        if client is not None:
            async with asyncio.timeout(SHIM_PATIENCE_S):
                await client.stop_pause()
    except PeerError as error:
        log.warning("sandbox %s: %s", work.sandbox.id, error)
    except TimeoutError:
        log.error("sandbox %s: its shim does not answer and is given up", work.sandbox.id)
        await work.services.shims.give_up(work.sandbox)
    if work.sandbox.pause is not None and work.sandbox.boot_id == work.services.node.boot_id:
        kill_process(work.sandbox.pause)
    work.sandbox.pause_alive = False


async def detach_network(work: Work) -> None:
    sandbox = work.sandbox
    if sandbox.network == "attached":
        alive = work.services.shims.find(sandbox) is not None
        await work.services.network.detach(sandbox.id, sandbox.netns_path if alive else None)
        sandbox.network = "released"


async def end_shim(work: Work) -> None:
    shims = work.services.shims
    try:
        async with asyncio.timeout(SHIM_PATIENCE_S):
            await shims.shutdown(work.sandbox)
    except PeerError as error:
        log.warning("sandbox %s: %s", work.sandbox.id, error)
    except TimeoutError:
        await shims.give_up(work.sandbox)
    if shims.is_silent(work.sandbox):
        await shims.give_up(work.sandbox)


async def save(work: Work) -> None:
    """A full disk does not keep a pod from being stopped: what the record lacks is found out again
    from the facts."""
    was_stopped = work.sandbox.phase == "stopped"
    work.sandbox.phase = "stopped"
    if not was_stopped and work.services.paths.sandbox_record(work.sandbox.id).exists():
        try:
            await disk.save_stopped(work.services.paths, work.sandbox)
        except Error as error:
            log.warning("sandbox %s: %s", work.sandbox.id, error)
    if work.was_ready:
        status.publish_stopped(work.services, work.sandbox)


STEPS: Steps[Work] = Steps(
    "stop_sandbox",
    [
        Step("refuse", refuse_more),
        Step("containers", end_containers),
        Step("nri", tell_plugins),
        Step("pause", end_pause),
        Step("network", detach_network),
        Step("shim", end_shim),
        Step("record", save),
    ],
)
