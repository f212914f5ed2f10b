"""Rotates the logs of containers whose annotation limits the log's size; `pyrunc-cri run` sets it.

The log file is renamed and the shim opens a new one, as kubelet does with ReopenContainerLog.
"""

from __future__ import annotations

import asyncio
import logging

from cri_server.containers import log_rotation, reopen_log
from cri_server.containers.log_rotation import RotationLimits
from cri_server.operations.tasks import shield_until_done
from cri_server.services import Services
from cri_server.store.model import Container
from pyrunc.errors import Error, NotFound, WrongState

log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""The time between two checks of the logs (kubelet: 10 s). A log can exceed its limit by what the
container writes in this time."""


async def rotate_logs(services: Services) -> None:
    """Check the logs of running containers every INTERVAL_S seconds, and rotate each log that
    exceeds its limit. Runs until cancelled. A repeated failure of one container is logged only
    once."""
    reported: set[str] = set()  # containers whose failure was logged already
    while True:
        for container in list(services.index.containers):
            limits = log_rotation.limits(container.config.annotations)
            if limits is None or not container.log_path or not container.running:
                continue
            try:
                await shield_until_done(rotate(services, container, limits))
                reported.discard(container.id)
            except Exception as error:
                if container.id not in reported:
                    expected = isinstance(error, Error | OSError)
                    text = "container %s: its log is not rotated: %s"
                    log.warning(text, container.id, error, exc_info=not expected)
                reported.add(container.id)
        reported.intersection_update(container.id for container in services.index.containers)
        await asyncio.sleep(INTERVAL_S)


async def rotate(services: Services, container: Container, limits: RotationLimits) -> None:
    """Rotate the container's log if it exceeds its limit. If the shim opens no new file, the log
    gets its old name back, and the shim's error is raised unless the container has exited. Raises
    OSError, Error."""
    path = container.log_path
    target = await asyncio.to_thread(log_rotation.move, path, limits.max_bytes)
    if target is None:
        return
    try:
        await reopen_log.reopen(services, container.id)
    except Error as error:
        await asyncio.to_thread(log_rotation.move_back, path, target)
        if isinstance(error, NotFound | WrongState):  # the container has exited meanwhile
            return
        raise
    await asyncio.to_thread(log_rotation.remove_oldest, path, limits.max_files)
