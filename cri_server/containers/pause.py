"""Pauses and resumes a container with its cgroup's freezer, for pyrunc's own calls beyond CRI.

CRI shows a paused container as RUNNING. Nothing is recorded: the state is read from the freezer,
also after a restart of the server.
"""

from __future__ import annotations

from cri_server.operations.tasks import finish_in_thread
from cri_server.services import Services
from cri_server.spec import groups
from cri_server.status.paused import is_paused
from cri_server.store.model import Container
from pyrunc.errors import KernelError, WrongState
from pyrunc.kernel import cgroup


def refuse_paused(container: Container) -> None:
    """Raise WrongState for a paused container, because a process that joins a frozen cgroup
    hangs."""
    if is_paused(container):
        raise WrongState(f"container {container.id} is paused")


async def pause(services: Services, reference: str) -> None:
    """Freeze a container; return when every process is frozen. Raises NotFound, WrongState,
    DeadlineExceeded (its processes continue), KernelError."""
    container = services.index.containers.get(reference)
    async with container.lock:
        _require_running(container)
        refuse_paused(container)
        await freeze(container)


async def freeze(container: Container) -> None:
    """Freeze the container; return when every process is frozen. Waits even when cancelled, so that
    the caller can thaw the container afterwards. Raises WrongState, DeadlineExceeded, KernelError.
    """
    try:
        await finish_in_thread(groups.place(container.cgroups_path, container.id).freeze)
    except KernelError as error:
        if error.errno in cgroup.GONE:
            raise WrongState(f"container {container.id} has exited") from None
        raise


async def unpause(services: Services, reference: str) -> None:
    """Thaw a paused container. Raises NotFound, WrongState (not paused), KernelError."""
    container = services.index.containers.get(reference)
    async with container.lock:
        _require_running(container)
        if not is_paused(container):
            raise WrongState(f"container {container.id} is not paused")
        thaw(container)


def thaw(container: Container) -> None:
    """Thaw the container if it is paused. Raises KernelError."""
    if is_paused(container):
        groups.place(container.cgroups_path, container.id).thaw()


def _require_running(container: Container) -> None:
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
