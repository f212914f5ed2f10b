"""ReopenContainerLog: kubelet has renamed the log file; the shim continues in a new one."""

from __future__ import annotations

from cri_server.containers.exec import running
from cri_server.services import Services


async def reopen(services: Services, reference: str) -> None:
    """Open the new file; returns when it exists. Raises NotFound, WrongState (not running: no file
    is made)."""
    container, pod = running(services, reference)
    await pod.reopen_log(container)
