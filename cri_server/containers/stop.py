"""StopContainer: sends the stop signal, and SIGKILL after the timeout.

The shim combines concurrent stops: it sends one signal and applies the earliest deadline. It
completes a stop even if the server ends.
"""

from __future__ import annotations

from cri_server.api import api_pb2 as api
from cri_server.containers import pause
from cri_server.services import Services
from cri_server.spec import signals
from cri_server.store.model import Container


async def stop(services: Services, reference: str, timeout_s: int) -> None:
    """Stop a container; return when it has exited. Does nothing for unknown, created and exited
    containers.

    Raises DeadlineExceeded when SIGKILL does not end it.
    """
    container = services.index.containers.find(reference)
    if container is not None:
        await end(services, container, signals.number(container.stop_signal), float(timeout_s))
        if container.exit is not None:
            await services.observer.stop_container(container)


async def kill(services: Services, container: Container) -> None:
    """Kill the container with SIGKILL, even if it is paused; return when it has exited. Does
    nothing for created and exited containers. Raises DeadlineExceeded when SIGKILL does not end
    it."""
    await end(services, container, signals.number("SIGKILL"), 0.0)


async def end(services: Services, container: Container, signal: int, timeout_s: float) -> None:
    """Send `signal` to the container, SIGKILL after `timeout_s`; return when it has exited. Thaws a
    paused container first. Does nothing for created and exited containers. Raises DeadlineExceeded
    when SIGKILL does not end it."""
    async with container.lock:
        pass  # wait for a start in progress: it decides whether there is a process to stop
    if container.state not in (api.CONTAINER_RUNNING, api.CONTAINER_UNKNOWN):
        return
    sandbox = services.index.sandboxes.find(container.sandbox_id)
    if sandbox is None:
        return
    # A frozen process takes fatal signals only (Linux, cgroup-v2.rst, cgroup.freeze): a handler for
    # the stop signal would not run.
    pause.thaw(container)
    await services.pod(sandbox).stop(container, signal, timeout_s)
