"""CheckpointPod: freezes those containers of a pod that the request names, captures them one after
the other, and thaws them. Then writes an archive of each into a folder.

| file | content |
|---|---|
| ID.tar | a container, as CheckpointContainer writes it |
| pod.options | the id of each container by its name (checkpointctl's CheckpointedPodOptions) |
| pod.dump | the pod's configuration, CRI's message as JSON |
| devshm-checkpoint.tar | the content of the /dev/shm that the containers share |

pod.options is written last: a folder without it is not a checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import pods
from cri_server.checkpoints.dump_requests import WRITE_TREE, WriteTree
from cri_server.containers import checkpoint as container_checkpoint
from cri_server.containers.pause import freeze
from cri_server.operations.tasks import gather
from cri_server.sandboxes import shm
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.errors import DeadlineExceeded, InvalidArgument, WrongState
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path


@dataclass(slots=True)
class PodCheckpointContext:
    """A pod's checkpoint in progress. `abandoned`: the caller of CheckpointPod no longer waits.
    `files`: paths of the files to remove after a failure."""

    services: Services
    sandbox: Sandbox
    containers: list[container_checkpoint.CheckpointContext]
    folder: str
    abandoned: bool = False
    files: list[str] = field(default_factory=list)

    def new_path(self, name: str) -> str:
        """Return the path for a new file in the checkpoint's folder, and add it to `files`."""
        path = f"{self.folder}/{name}"
        self.files.append(path)
        return path

    def raise_if_abandoned(self) -> None:
        """Raise DeadlineExceeded when the caller no longer waits."""
        if self.abandoned:
            raise DeadlineExceeded(
                f"checkpoint of pod {self.sandbox.id}: the caller no longer waits for it"
            )


async def checkpoint(services: Services, request: api.CheckpointPodRequest) -> None:
    """Write a checkpoint of the requested containers into the caller's folder, which must be empty
    and is empty again after a failure. The containers run again when this returns.

    Raises NotFound, InvalidArgument, WrongState (not running, no CRIU, a checkpoint is under way),
    Unsupported, PeerError with CRIU's log, ResourceExhausted, KernelError.
    """
    if request.options:
        raise InvalidArgument(f"options: unknown option {sorted(request.options)[0][:80]!r}")
    sandbox = services.index.sandboxes.get(request.pod_sandbox_id)
    selected = _select_containers(services, sandbox, request.container_ids)
    await asyncio.to_thread(_check_folder, request.output_path)
    if sandbox.state != api.SANDBOX_READY:
        raise WrongState(f"sandbox {sandbox.id} is not ready")
    for container in selected:
        container_checkpoint.require(services, sandbox, container)
    context = PodCheckpointContext(
        services,
        sandbox,
        [container_checkpoint.CheckpointContext(services, sandbox, c) for c in selected],
        request.output_path,
    )
    try:
        await services.running.join(container_checkpoint.key(sandbox), lambda: _checkpoint(context))
    except asyncio.CancelledError:
        context.abandoned = True
        raise


def _select_containers(
    services: Services, sandbox: Sandbox, references: Sequence[str]
) -> list[Container]:
    if not references:
        raise InvalidArgument("container_ids is empty")
    containers = [services.index.containers.get(reference) for reference in references]
    names = [container.config.metadata.name for container in containers]
    for container in containers:
        if container.sandbox_id != sandbox.id:
            raise InvalidArgument(f"container {container.id} belongs to another sandbox")
        if names.count(container.config.metadata.name) > 1:
            raise InvalidArgument(
                f"container_ids: two containers are named {container.config.metadata.name!r}"
            )

    return containers


def _check_folder(path: str) -> None:
    """Raise InvalidArgument unless `path` is an existing empty directory."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgument(f"output_path {path!r} is not an absolute path")
    try:
        if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            raise InvalidArgument(f"output_path {path!r} is not a directory")
        if os.listdir(path):
            raise InvalidArgument(f"output_path {path!r} is not empty")
    except OSError as error:
        raise InvalidArgument(f"output_path {path!r}: {error.strerror}") from None


async def _checkpoint(context: PodCheckpointContext) -> None:
    try:
        with context.sandbox.gate:
            await _capture(context)
            for each in context.containers:
                context.raise_if_abandoned()
                await container_checkpoint.pack(
                    each, context.new_path(pods.archive(each.container.id))
                )
            context.raise_if_abandoned()
            await asyncio.to_thread(_describe, context)
            context.raise_if_abandoned()
    except BaseException:
        await asyncio.to_thread(_remove, context.files)
        raise
    finally:
        for each in context.containers:
            await asyncio.to_thread(remove_path, each.work)


async def _capture(context: PodCheckpointContext) -> None:
    """Freeze all requested containers, capture them one after the other, then thaw them, also after
    a failure."""
    for each in context.containers:
        target = f"{context.folder}/{pods.archive(each.container.id)}"
        await asyncio.to_thread(container_checkpoint.make_work, each.work, target)
    async with contextlib.AsyncExitStack() as locks:
        # In the order of the ids, so that two checkpoints with containers in common cannot
        # deadlock.
        for each in sorted(context.containers, key=lambda each: each.container.id):
            await locks.enter_async_context(each.container.lock)
            container_checkpoint.require_running(each.container)
        try:
            # Not asyncio's gather: when one freeze fails, the threads of the others must end before
            # the thaw, or their containers would stay frozen.
            await gather(*(freeze(each.container) for each in context.containers))
            for each in context.containers:
                context.raise_if_abandoned()
                await container_checkpoint.capture(each)
            await _capture_shm(context)
        finally:
            for each in context.containers:
                container_checkpoint.thaw(each.container)


async def _capture_shm(context: PodCheckpointContext) -> None:
    async with shm.open_mounts(context.services, context.sandbox) as mounts:
        if mounts:
            await container_checkpoint.run(
                context.services, WRITE_TREE, WriteTree(context.new_path(pods.SHM)), mounts
            )


def _describe(context: PodCheckpointContext) -> None:
    from google.protobuf import json_format  # used by this function only

    config = json_format.MessageToDict(context.sandbox.config, preserving_proto_field_name=True)
    metadata = context.sandbox.config.metadata
    options = pods.Options(
        containers={
            each.container.config.metadata.name: each.container.id for each in context.containers
        },
        annotations={
            "org.criu.checkpoint.engine.name": "pyrunc",
            "org.criu.checkpoint.pod.name": metadata.name,
            "org.criu.checkpoint.pod.namespace": metadata.namespace,
            "org.criu.checkpoint.pod.uid": metadata.uid,
            "org.criu.checkpoint.pod.id": context.sandbox.id,
        },
    )
    with disk_errors("write", context.folder):
        for name, content in (
            (pods.DUMP, json.dumps(config).encode()),
            (pods.OPTIONS, msgspec.json.encode(options)),
        ):
            atomic_file.write_bytes(context.new_path(name), content, durable=True)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
