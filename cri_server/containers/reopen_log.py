"""ReopenContainerLog: has the shim write to a new log file after kubelet has renamed the old
one."""

from __future__ import annotations

from cri_server.containers.exec import require_running
from cri_server.services import Services


async def reopen(services: Services, reference: str) -> None:
    """Have the shim open a new log file; return when the file exists. Raises NotFound, WrongState
    if the container does not run."""
    container, pod = require_running(services, reference)
    await pod.reopen_log(container)
