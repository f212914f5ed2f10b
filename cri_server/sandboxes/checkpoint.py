"""CheckpointPod: containers of a pod stand still together, are captured one by one, and go on; each
becomes an archive in a folder.

| file | what |
|---|---|
| ID.tar | a container, as CheckpointContainer writes it |
| pod.options | which archive is which container's (checkpointctl's CheckpointedPodOptions) |
| pod.dump | the pod's configuration, CRI's message as JSON |
| devshm-checkpoint.tar | what is in the /dev/shm that the containers share |

pod.options is written last: a folder without it is no checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import pods
from cri_server.checkpoints.dump import WRITE_TREE, WriteTree
from cri_server.containers import checkpoint as containers
from cri_server.operations.tasks import gather
from cri_server.sandboxes import shm
from cri_server.services import Services
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.errors import DeadlineExceeded, InvalidArgument, WrongState
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path


@dataclass(slots=True)
class Job:
    """A pod's checkpoint that is being made. `given_up`: nobody waits for it any more."""

    services: Services
    sandbox: Sandbox
    parts: list[containers.Job]
    folder: str
    given_up: bool = False
    made: list[str] = field(default_factory=list)

    def place(self, name: str) -> str:
        """The path of a file that is going to be in the folder."""
        path = f"{self.folder}/{name}"
        self.made.append(path)
        return path

    def go_on(self) -> None:
        """Raises DeadlineExceeded where it need not."""
        if self.given_up:
            raise DeadlineExceeded(
                f"the caller of the checkpoint of pod {self.sandbox.id} does not wait"
            )


async def checkpoint(services: Services, request: api.CheckpointPodRequest) -> None:
    """Fill the caller's empty folder, or leave it empty. The containers run when this returns.

    Raises NotFound, InvalidArgument, WrongState (not running, no CRIU, a checkpoint is under way),
    Unsupported, PeerError with what CRIU logged, ResourceExhausted, KernelError.
    """
    if request.options:
        raise InvalidArgument(f"options: there is none called {sorted(request.options)[0][:80]!r}")
    sandbox = services.index.sandboxes.get(request.pod_sandbox_id)
    chosen = _choose(services, sandbox, request.container_ids)
    await asyncio.to_thread(_check_folder, request.output_path)
    if sandbox.state != api.SANDBOX_READY:
        raise WrongState(f"sandbox {sandbox.id} is not ready")
    for container in chosen:
        containers.require(services, sandbox, container)
    job = Job(
        services,
        sandbox,
        [containers.Job(services, sandbox, c) for c in chosen],
        request.output_path,
    )
    try:
        await services.running.join(containers.key(sandbox), lambda: _checkpoint(job))
    except asyncio.CancelledError:
        job.given_up = True
        raise


def _choose(services: Services, sandbox: Sandbox, references: Sequence[str]) -> list[Container]:
    if not references:
        raise InvalidArgument("container_ids is empty")
    found = [services.index.containers.get(reference) for reference in references]
    names = [container.config.metadata.name for container in found]
    for container in found:
        if container.sandbox_id != sandbox.id:
            raise InvalidArgument(f"container {container.id} belongs to another sandbox")
        if names.count(container.config.metadata.name) > 1:
            raise InvalidArgument(
                f"container_ids: {container.config.metadata.name!r} is there twice"
            )
    return found


def _check_folder(path: str) -> None:
    """The caller has made it, and nobody else has put anything into it."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgument(f"output_path {path!r} is not an absolute path")
    try:
        if not stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode):
            raise InvalidArgument(f"output_path {path!r} is not a directory")
        if os.listdir(path):
            raise InvalidArgument(f"output_path {path!r} is not empty")
    except OSError as error:
        raise InvalidArgument(f"output_path {path!r}: {error.strerror}") from None


async def _checkpoint(job: Job) -> None:
    try:
        with job.sandbox.gate:
            await _capture(job)
            for part in job.parts:
                job.go_on()
                await containers.pack(part, job.place(pods.archive(part.container.id)))
            job.go_on()
            await asyncio.to_thread(_describe, job)
            job.go_on()
    except BaseException:
        await asyncio.to_thread(_remove, job.made)
        raise
    finally:
        for part in job.parts:
            await asyncio.to_thread(remove_path, part.work)


async def _capture(job: Job) -> None:
    """All stand still before the first is looked at, and go on whatever happens."""
    for part in job.parts:
        target = f"{job.folder}/{pods.archive(part.container.id)}"
        await asyncio.to_thread(containers.make_work, part.work, target)
    async with contextlib.AsyncExitStack() as locks:
        for part in sorted(job.parts, key=lambda part: part.container.id):
            await locks.enter_async_context(part.container.lock)
            containers.require_running(part.container)
        try:
            await gather(*(containers.freeze(part.container) for part in job.parts))
            for part in job.parts:
                job.go_on()
                await containers.capture(part)
            await _capture_shm(job)
        finally:
            for part in job.parts:
                containers.thaw(part.container)


async def _capture_shm(job: Job) -> None:
    async with shm.opened(job.services, job.sandbox) as mounts:
        if mounts:
            await containers.run(job.services, WRITE_TREE, WriteTree(job.place(pods.SHM)), mounts)


def _describe(job: Job) -> None:
    from google.protobuf import json_format  # which nothing else needs

    config = json_format.MessageToDict(job.sandbox.config, preserving_proto_field_name=True)
    metadata = job.sandbox.config.metadata
    options = pods.Options(
        containers={part.container.config.metadata.name: part.container.id for part in job.parts},
        annotations={
            "org.criu.checkpoint.engine.name": "pyrunc",
            "org.criu.checkpoint.pod.name": metadata.name,
            "org.criu.checkpoint.pod.namespace": metadata.namespace,
            "org.criu.checkpoint.pod.uid": metadata.uid,
            "org.criu.checkpoint.pod.id": job.sandbox.id,
        },
    )
    with disk_errors("write", job.folder):
        for name, content in (
            (pods.DUMP, json.dumps(config).encode()),
            (pods.OPTIONS, options.encode()),
        ):
            atomic_file.write_bytes(job.place(name), content, durable=True)


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
