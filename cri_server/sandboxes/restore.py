"""RestorePod: a new sandbox, and in it a container for each archive of a pod's checkpoint, all of
them created and none started.

The pod has an address of its own, and the mounts of its containers are the request's. The
checkpoint is only read.
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
from cri_server.checkpoints.read import FILL, UNPACK, Fill, Unpack
from cri_server.containers import checkpoint as checkpoints
from cri_server.containers import create
from cri_server.images.unpack import TREE
from cri_server.sandboxes import remove, run, shm
from cri_server.services import Services
from cri_server.store.model import sandbox_name
from pyrunc.errors import AlreadyExists, Error, InvalidArgument, NotFound
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)


async def restore(services: Services, request: api.RestorePodRequest) -> api.RestorePodResponse:
    """The sandbox's id, and its containers'. On failure nothing of them is left.

    Raises InvalidArgument, NotFound, AlreadyExists, WrongState (no CRIU), and what RunPodSandbox
    and CreateContainer raise.
    """
    if request.options:
        raise InvalidArgument(f"options: there is none called {sorted(request.options)[0][:80]!r}")
    run.check(request.config)
    found = await asyncio.to_thread(_read, request.checkpoint_path)
    _compare(found, request.container_configs)
    checkpoints.require_criu()
    name = sandbox_name(request.config.metadata)
    if services.index.sandboxes.named(name) is not None or ("run", name) in services.running:
        raise AlreadyExists(f"there is a sandbox {'_'.join(map(str, name))} already")
    return await services.running.join(
        ("restore", name), lambda: _restore(services, request, found), request=request
    )


def _read(folder: str) -> pods.Options:
    if not folder.startswith("/") or "\0" in folder:
        raise InvalidArgument(f"checkpoint_path {folder!r} is not an absolute path")
    number = _open_regular(f"{folder}/{pods.OPTIONS}")
    if number is None:
        raise NotFound(
            f"checkpoint_path {folder!r} holds no pod's checkpoint: there is no {pods.OPTIONS}"
        )
    with open(number, "rb") as file:
        return pods.decode(file.read(pods.LIMIT_BYTES))


def _open_regular(path: str) -> int | None:
    """A file of the checkpoint; None when it is not there. Raises InvalidArgument for a link, a
    pipe, a device, a folder: reading those may not end."""
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
        raise InvalidArgument(f"{path} is no regular file")
    return number


def _compare(found: pods.Options, configs: Sequence[api.ContainerConfig]) -> None:
    wanted = [config.metadata.name for config in configs]
    twice = [name for name in wanted if wanted.count(name) > 1]
    if twice:
        raise InvalidArgument(f"container_configs: {twice[0]!r} is there twice")
    if set(wanted) != set(found.containers):
        raise InvalidArgument(
            f"container_configs are {', '.join(sorted(wanted)) or 'none'}; the checkpoint has {', '.join(sorted(found.containers))}"
        )


async def _restore(
    services: Services, request: api.RestorePodRequest, found: pods.Options
) -> api.RestorePodResponse:
    sandbox = await run.run(services, request.config, request.runtime_handler)
    response = api.RestorePodResponse(pod_sandbox_id=sandbox)
    try:
        await _fill_shm(services, sandbox, f"{request.checkpoint_path}/{pods.SHM}")
        for config in request.container_configs:
            archive = (
                f"{request.checkpoint_path}/{pods.archive(found.containers[config.metadata.name])}"
            )
            identifier = await create.create(
                services, sandbox, config, request.config, archive=archive
            )
            response.restored_containers.add(name=config.metadata.name, container_id=identifier)
    except BaseException:
        try:
            await remove.remove(services, sandbox)
        except Error as error:
            log.warning("sandbox %s, which was not restored, is left: %s", sandbox, error)
        raise
    return response


async def _fill_shm(services: Services, sandbox_id: str, archive: str) -> None:
    content = _open_regular(archive)
    if content is None:
        return
    folder = Path(services.paths.sandbox_root(sandbox_id), "shm")
    try:
        await asyncio.to_thread(_make, folder)
        await checkpoints.run(
            services, UNPACK, Unpack(str(folder), services.images.room()), [content]
        )
        async with shm.opened(services, services.index.sandboxes.get(sandbox_id)) as mounts:
            if mounts:
                await checkpoints.run(services, FILL, Fill(str(folder / TREE)), mounts)
        await asyncio.to_thread(remove_path, folder)
    finally:
        os.close(content)


def _make(folder: Path) -> None:
    with disk_errors("mkdir", str(folder)):
        folder.mkdir(mode=0o700)
