"""Opens the /dev/shm that a pod's containers share. It is a detached mount: no path on the host
leads to it, and the pod's shim and the keeper have its descriptors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from cri_server.api import api_pb2 as api
from cri_server.services import Services
from cri_server.spec.mounts import OUR_MOUNTS, POD_SHM
from cri_server.store.model import Sandbox
from pyrunc.kernel.fd import close_all


@contextlib.asynccontextmanager
async def open_mounts(services: Services, sandbox: Sandbox) -> AsyncIterator[list[int]]:
    """Yield a list of one descriptor, that of the pod's /dev/shm mount, and close it after the
    `with` block. Yield an empty list if the pod uses the host's /dev/shm. Raises Unavailable if no
    keeper answers or the keeper does not have the pod's descriptors."""
    if sandbox.options.ipc == api.NODE:
        yield []
        return
    record, fds = await services.shims.stored.open_pause(sandbox.id)
    try:
        # The descriptors of the mounts come last, after the pidfd and perhaps a network namespace.
        mounts = dict(zip(reversed(record.mounts), reversed(fds), strict=False))
        name = POD_SHM.removeprefix(OUR_MOUNTS)
        yield [mounts[name]] if name in mounts else []
    finally:
        close_all(fds)
