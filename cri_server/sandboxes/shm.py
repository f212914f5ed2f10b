"""The /dev/shm that a pod's containers share: a mount that the pod's shim holds, and that is attached nowhere on the host."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from cri_server.api import api_pb2 as api
from cri_server.services import Services
from cri_server.spec.mounts import OUR_MOUNTS, POD_SHM
from cri_server.store.model import Sandbox


@contextlib.asynccontextmanager
async def opened(services: Services, sandbox: Sandbox) -> AsyncIterator[list[int]]:
    """A descriptor of the mount, for a block; none for a pod that has the host's. Raises Unavailable."""
    if sandbox.options.ipc == api.NODE:
        yield []
        return
    kept = await services.shims.get(sandbox).keep_holder()
    try:
        mounts = dict(zip(reversed(kept.record.mounts), reversed(kept.fds), strict=False))
        name = POD_SHM.removeprefix(OUR_MOUNTS)
        yield [mounts[name]] if name in mounts else []
    finally:
        kept.close()
