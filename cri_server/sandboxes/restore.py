"""RestorePod: creates a sandbox, and in it one container for each archive of a pod's checkpoint.
The caller starts the containers.

The pod gets a new address, and the containers get the mounts of the request. The checkpoint is not
changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import pods
from cri_server.checkpoints.read import FILL, Fill
from cri_server.containers import checkpoint as container_checkpoint
from cri_server.containers import create
from cri_server.containers.restore import unpack
from cri_server.images.layers.unpack import TREE
from cri_server.sandboxes import remove, run, shm
from cri_server.services import Services
from cri_server.store.model import sandbox_name
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, NotFound
from pyrunc.kernel.fd import closing_fd
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)


async def restore(services: Services, request: api.RestorePodRequest) -> api.RestorePodResponse:
    """Restore a pod and return the ids of its sandbox and containers. A failed call leaves neither
    a sandbox nor containers.

    Raises InvalidArgument for an invalid request or checkpoint, NotFound if the folder has no
    checkpoint, AlreadyExists if a sandbox has this name, WrongState without CRIU, and the errors of
    RunPodSandbox and CreateContainer.
    """
    if request.options:
        raise InvalidArgument(f"options: unknown option {sorted(request.options)[0][:80]!r}")
    run.check(request.config)
    options = await asyncio.to_thread(_read, request.checkpoint_path)
    _compare(options, request.container_configs)
    container_checkpoint.require_criu()
    name = sandbox_name(request.config.metadata)
    if services.index.sandboxes.find_by_name(name) is not None or ("run", name) in services.running:
        raise AlreadyExists(f"sandbox {'_'.join(map(str, name))} exists already")
    return await services.running.join(
        ("restore", name), lambda: _restore(services, request, options), request=request
    )


def _read(folder: str) -> pods.Options:
    if not folder.startswith("/") or "\0" in folder:
        raise InvalidArgument(f"checkpoint_path {folder!r} is not an absolute path")
    number = _open_regular(f"{folder}/{pods.OPTIONS}")
    if number is None:
        raise NotFound(
            f"checkpoint_path {folder!r} is not a pod's checkpoint: it has no {pods.OPTIONS}"
        )
    with open(number, "rb") as file:
        return pods.decode(file.read(pods.LIMIT_BYTES))


def _open_regular(path: str) -> int | None:
    """Open a file of the checkpoint; return None if it does not exist. Raises InvalidArgument for a
    symlink, FIFO, device or folder, because reading from it might never end."""
    try:
        number = os.open(
            path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise InvalidArgument(f"{path} is not a regular file")
    return number


def _compare(options: pods.Options, configs: Sequence[api.ContainerConfig]) -> None:
    names = [config.metadata.name for config in configs]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise InvalidArgument(f"container_configs: two containers are named {duplicates[0]!r}")
    if set(names) != set(options.containers):
        raise InvalidArgument(
            f"container_configs names {', '.join(sorted(names)) or 'no container'}, but"
            f" the checkpoint has {', '.join(sorted(options.containers))}"
        )


async def _restore(
    services: Services, request: api.RestorePodRequest, options: pods.Options
) -> api.RestorePodResponse:
    sandbox = await run.run(services, request.config, request.runtime_handler)
    response = api.RestorePodResponse(pod_sandbox_id=sandbox)
    try:
        await _fill_shm(services, sandbox, f"{request.checkpoint_path}/{pods.SHM}")
        for config in request.container_configs:
            archive = pods.archive(options.containers[config.metadata.name])
            identifier = await create.create(
                services, sandbox, config, archive=f"{request.checkpoint_path}/{archive}"
            )
            response.restored_containers.add(name=config.metadata.name, container_id=identifier)
    except BaseException:
        try:
            await remove.remove(services, sandbox)
        except Error as error:
            log.warning("sandbox %s was not restored and cannot be removed: %s", sandbox, error)
        raise
    return response


async def _fill_shm(services: Services, sandbox_id: str, archive: str) -> None:
    content = _open_regular(archive)
    if content is None:
        return
    folder = Path(services.paths.sandbox_root(sandbox_id), "shm")
    with closing_fd(content):
        await unpack(services, folder, content)
        async with shm.open_mounts(services, services.index.sandboxes.get(sandbox_id)) as mounts:
            if mounts:
                await container_checkpoint.run(services, FILL, Fill(str(folder / TREE)), mounts)
        await asyncio.to_thread(remove_path, folder)
