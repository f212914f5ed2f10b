"""StopPodSandbox: ends the containers and the pause process, and detaches the network. The sandbox
is then listed as not ready.

Every step is idempotent, because kubelet repeats this call, also after a reboot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass

from cri_server.containers import launch
from cri_server.containers import stop as container_stop
from cri_server.operations.steps import Step, Steps
from cri_server.services import Services
from cri_server.status import sandbox as status
from cri_server.store import disk
from cri_server.store.model import Sandbox
from pyrunc.errors import Error, WrongState

log = logging.getLogger(__name__)

START_TIMEOUT_S = 5.0


async def release_network(services: Services, reference: str) -> list[str]:
    """Release the network of a stopped pod even if its CNI plugins fail; return one line for each
    failed plugin.

    Raises NotFound, WrongState while the pod runs.
    """
    sandbox = services.index.sandboxes.get(reference)
    if sandbox.pause_alive:
        raise WrongState(f"sandbox {sandbox.id} is running: stop it first")
    if sandbox.host_network:
        return []
    refusals = await services.network.release(sandbox.id, sandbox.netns_path or None)
    if sandbox.network == "attached":
        sandbox.network = "released"
    return refusals


@dataclass(slots=True)
class StopContext:
    """A sandbox that is being stopped."""

    services: Services
    sandbox: Sandbox
    was_ready: bool


async def stop(services: Services, reference: str) -> None:
    """Stop a sandbox; return when none of its processes run and its address is free. Does nothing
    for an unknown id.

    Raises the errors of the network plugins; the caller may then repeat the call.
    """
    sandbox = services.index.sandboxes.find(reference)
    if sandbox is not None:
        await stop_sandbox(services, sandbox)


async def stop_sandbox(services: Services, sandbox: Sandbox) -> None:
    """Stop the sandbox: end its containers and pause process, and detach its network. Does nothing
    for a stopped sandbox. Concurrent calls wait for the same operation. Raises the errors of the
    network plugins."""
    if _is_stopped(services, sandbox):
        return
    context = StopContext(services, sandbox, sandbox.phase == "ready" and sandbox.pause_alive)
    await services.running.join(("stop", sandbox.id), lambda: STEPS.run(context))


def _is_stopped(services: Services, sandbox: Sandbox) -> bool:
    return (
        sandbox.phase == "stopped"
        and sandbox.network != "attached"
        and not services.pod(sandbox).has_shim
        and not services.pod(sandbox).is_silent
        and not any(c.running for c in services.index.containers_of(sandbox))
    )


async def close_gate(context: StopContext) -> None:
    """Refuse new creations and starts of containers, and wait for those in progress. A start that
    takes longer than `START_TIMEOUT_S` is killed, because the storage of a volume may never
    answer."""
    context.sandbox.phase = "stopping"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await context.sandbox.gate.empty()
    except TimeoutError:
        await _end_starts(context)
        await context.sandbox.gate.empty()
    pod = context.services.pod(context.sandbox)
    if pod.is_silent:
        await pod.reach()


async def _end_starts(context: StopContext) -> None:
    pod = context.services.pod(context.sandbox)
    starting = [c for c in context.services.index.containers_of(context.sandbox) if c.starting]
    for container in starting:
        log.warning(
            "container %s: its start was killed after %g s, because its pod is being stopped",
            container.id,
            START_TIMEOUT_S,
        )
        with contextlib.suppress(Error):  # the container or its shim has ended meanwhile
            await pod.kill(container, signal.SIGKILL)


async def end_containers(context: StopContext) -> None:
    living = [c for c in context.services.index.containers_of(context.sandbox) if c.exit is None]
    # Without a grace period: kubelet has granted it by StopContainer, and CRI requires
    # StopPodSandbox to kill all remaining processes.
    await asyncio.gather(*(container_stop.kill(context.services, c) for c in living))
    await asyncio.gather(*(launch.drop(context.services, c) for c in living))
    for container in living:
        await context.services.observer.stop_container(container)


async def notify_plugins(context: StopContext) -> None:
    """Notify NRI plugins of the stop while the network still exists."""
    await context.services.observer.stop_pod(context.sandbox)


async def end_pause(context: StopContext) -> None:
    await context.services.pod(context.sandbox).stop_pause(context.services.node.boot_id)


async def detach_network(context: StopContext) -> None:
    sandbox = context.sandbox
    if sandbox.network == "attached":
        alive = context.services.pod(sandbox).has_shim
        # The path of an earlier version's pod is in its shim's /proc/PID/fd. After the shim's death
        # it may name another file, so it is left out: CNI_NETNS is optional for DEL (CNI
        # specification, "DEL").
        await context.services.network.detach(sandbox.id, sandbox.netns_path if alive else None)
        sandbox.network = "released"


async def end_shim(context: StopContext) -> None:
    await context.services.pod(context.sandbox).end()


async def save(context: StopContext) -> None:
    """Record that the sandbox is stopped. A full disk is no error: a restarted server sees from
    the processes that the pod has ended."""
    was_stopped = context.sandbox.phase == "stopped"
    context.sandbox.phase = "stopped"
    if not was_stopped and context.services.paths.sandbox_record(context.sandbox.id).exists():
        try:
            # For a pod of this boot this writes only a file on the tmpfs, without fsync: after a
            # power cut the pod is stopped anyway.
            await disk.save_stopped(context.services.paths, context.sandbox)
        except Error as error:
            log.warning("sandbox %s: cannot write its record: %s", context.sandbox.id, error)
    if context.was_ready:
        status.publish_stopped(context.services, context.sandbox)


STEPS: Steps[StopContext] = Steps(
    "stop_sandbox",
    [
        Step("refuse", close_gate),
        Step("containers", end_containers),
        Step("nri", notify_plugins),
        Step("pause", end_pause),
        Step("network", detach_network),
        Step("shim", end_shim),
        Step("record", save),
    ],
)
