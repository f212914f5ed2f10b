"""ReopenContainerLog: kubelet renamed the file; from here on lines go to a new one."""

from __future__ import annotations

from cri_server.containers.exec import running
from cri_server.services import Services


async def reopen(services: Services, reference: str) -> None:
    """Returns when the new file exists. Raises NotFound, WrongState (not running: no file is made)."""
    _, container, client = running(services, reference)
    await client.reopen_log(container.id)
