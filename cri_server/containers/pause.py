"""Pause and unpause a container by its cgroup's freezer: calls of our own, for CRI has none.

To CRI a paused container is RUNNING. Nothing is recorded: the freezer itself says who is paused, to
a restarted server as well.
"""

from __future__ import annotations

import asyncio

from cri_server.services import Services
from cri_server.spec import groups
from cri_server.status.paused import is_paused
from cri_server.store.model import Container
from pyrunc.errors import KernelError, WrongState
from pyrunc.kernel import cgroup as tree


def refuse_paused(container: Container) -> None:
    """Raises WrongState: a process that is put into a frozen group would hang as well."""
    if is_paused(container):
        raise WrongState(f"container {container.id} is paused")


async def pause(services: Services, reference: str) -> None:
    """Returns when every process stands still. Raises NotFound, WrongState, DeadlineExceeded (they
    run on then), KernelError."""
    container = services.index.containers.get(reference)
    async with container.lock:
        _expect_running(container)
        refuse_paused(container)
        try:
            await asyncio.to_thread(groups.place(container.cgroups_path, container.id).freeze)
        except KernelError as error:
            if error.errno in tree.GONE:
                raise WrongState(f"container {container.id} has exited") from None
            raise


async def unpause(services: Services, reference: str) -> None:
    """Raises NotFound, WrongState (it is not paused), KernelError."""
    container = services.index.containers.get(reference)
    async with container.lock:
        _expect_running(container)
        if not is_paused(container):
            raise WrongState(f"container {container.id} is not paused")
        thaw(container)


def thaw(container: Container) -> None:
    """Let it run on if it is paused. Raises KernelError."""
    if is_paused(container):
        groups.place(container.cgroups_path, container.id).thaw()


def _expect_running(container: Container) -> None:
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
