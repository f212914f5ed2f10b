"""StopContainer: the stop signal, and SIGKILL when the time is up.

The shim decides about concurrent stops (one signal, the earliest deadline wins) and goes on when we
are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from cri_server.api import api_pb2 as api
from cri_server.containers import pause
from cri_server.services import Services
from cri_server.spec import signals
from cri_server.store.model import Container, Exit, Sandbox
from pyrunc.errors import NotFound, PeerError, Unavailable

log = logging.getLogger(__name__)

MOST_SHIMS = 5  # that are killed while one container is stopped
# beyond the grace period; the shim itself says after 10 s that SIGKILL did not help
SHIM_PATIENCE_S = 20.0


async def stop(services: Services, reference: str, timeout_s: int) -> None:
    """Returns when the container has exited. Unknown, created and exited ones are fine.

    Raises DeadlineExceeded when not even SIGKILL ends it.
    """
    container = services.index.containers.find(reference)
    if container is not None:
        await end(services, container, signals.number(container.stop_signal), float(timeout_s))
        if container.exit is not None:
            await services.observer.stop_container(container)


async def kill(services: Services, container: Container) -> None:
    """SIGKILL now, whatever state the container is in."""
    await end(services, container, signals.number("SIGKILL"), 0.0)


async def end(services: Services, container: Container, signal: int, timeout_s: float) -> None:
    """As `stop`, for a container at hand."""
    async with container.lock:
        pass  # a start that is under way decides first whether there is anything to stop
    if container.state not in (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN):
        return
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    if sandbox is None:
        return
    pause.thaw(container)  # it could not hear the signal
    for _ in range(MOST_SHIMS):
        if not await services.shims.reach(sandbox):
            await services.shims.give_up(sandbox)
            return
        if container.exit is not None:  # as we have just heard
            return
        with contextlib.suppress(
            PeerError
        ):  # the shim was killed meanwhile: another one has its containers, or they have ended
            await _end(services, sandbox, container, signal, timeout_s)
            return
    raise Unavailable(
        f"container {container.id}: {MOST_SHIMS} shims were lost while it was being stopped"
    )


async def _end(
    services: Services, sandbox: Sandbox, container: Container, signal: int, timeout_s: float
) -> None:
    """By the shim that answers. Raises PeerError when it does not any more."""
    client = services.shims.get(sandbox)
    patience_s = max(timeout_s, 0.0) + SHIM_PATIENCE_S
    try:
        async with asyncio.timeout(patience_s):
            ended = await client.stop(container.id, signal, max(timeout_s, 0.0))
    except TimeoutError:
        log.error(
            "container %s: its shim did not answer for %g s and is given up",
            container.id,
            patience_s,
        )
        await services.shims.give_up(sandbox)
    except NotFound:
        if container.exit is None:
            raise
    else:
        container.ended(Exit.of_shim(ended))
