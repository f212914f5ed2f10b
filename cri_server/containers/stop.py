"""StopContainer: sends the stop signal, and SIGKILL after the timeout.

The shim combines concurrent stops (one signal, the earliest deadline wins) and completes a stop
even if the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from cri_server.api import api_pb2 as api
from cri_server.containers import pause
from cri_server.services import Services
from cri_server.spec import signals
from cri_server.store.model import Container, Sandbox
from pyrunc.errors import NotFound, PeerError, Unavailable

log = logging.getLogger(__name__)

SHIMS_LIMIT = 5  # that are lost while one container is stopped
# Beyond the grace period. The shim itself reports after 10 s that SIGKILL had no effect.
SHIM_TIMEOUT_S = 20.0


async def stop(services: Services, reference: str, timeout_s: int) -> None:
    """Stop a container; returns when it has exited. Unknown, created and exited ones succeed.

    Raises DeadlineExceeded when not even SIGKILL ends it."""
    container = services.index.containers.find(reference)
    if container is not None:
        await end(services, container, signals.number(container.stop_signal), float(timeout_s))
        if container.exit is not None:
            await services.observer.stop_container(container)


async def kill(services: Services, container: Container) -> None:
    """Kill the container with SIGKILL, in any of its states."""
    await end(services, container, signals.number("SIGKILL"), 0.0)


async def end(services: Services, container: Container, signal: int, timeout_s: float) -> None:
    """Stop `container` like `stop`, with signal and timeout."""
    async with container.lock:
        pass  # a start in progress decides first whether there is a process to stop
    if container.state not in (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN):
        return
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    if sandbox is None:
        return
    pause.thaw(container)  # a frozen process does not act on signals
    for _ in range(SHIMS_LIMIT):
        if not await services.shims.reach(sandbox):
            await services.shims.give_up(sandbox)
            return
        if container.exit is not None:  # the shim has just reported it
            return
        with contextlib.suppress(
            PeerError
        ):  # the shim was killed meanwhile: another one has its containers, or they have ended
            await _end(services, sandbox, container, signal, timeout_s)
            return
    raise Unavailable(
        f"container {container.id}: {SHIMS_LIMIT} shims were lost while it was being stopped"
    )


async def _end(
    services: Services, sandbox: Sandbox, container: Container, signal: int, timeout_s: float
) -> None:
    """Stop the container through its shim. Raises PeerError when the shim is lost."""
    client = services.shims.get(sandbox)
    patience_s = max(timeout_s, 0.0) + SHIM_TIMEOUT_S
    try:
        async with asyncio.timeout(patience_s):
            exit_message = await client.stop(container.id, signal, max(timeout_s, 0.0))
    except TimeoutError:
        log.error(
            "container %s: its shim did not answer for %g s and is abandoned",
            container.id,
            patience_s,
        )
        await services.shims.give_up(sandbox)
    except NotFound:
        if container.exit is None:
            raise
    else:
        container.ended(exit_message)
