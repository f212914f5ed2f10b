"""CheckpointContainer: CRIU dumps a running container, which then continues. The complete archive
is renamed to the path `location` (rename(2)).

The container is frozen while its processes and its writable layer are captured, so that both have
the same state. It runs again while the archive is packed. A running CRIU is never killed, because
it executes code inside the container's processes. After a timeout the caller gets an error at once,
and the archive is removed when CRIU has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cri_server.checkpoints import describe
from cri_server.checkpoints.dump_requests import DUMP, PACK, Pack, TakeDump
from cri_server.checkpoints.names import UNFINISHED
from cri_server.config import handlers
from cri_server.containers import anonymous_volumes
from cri_server.containers.pause import freeze, refuse_paused
from cri_server.services import Services
from cri_server.spec import groups, namespaces
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.checkpoint import criu
from pyrunc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    WrongState,
)
from pyrunc.kernel.full import disk_error, disk_errors
from pyrunc.kernel.tree import remove_path
from pyrunc.records import Record

CRIU_TIMEOUT_S = 1800.0  # for CRIU and the disk; the container cannot be stopped meanwhile


@dataclass(slots=True)
class CheckpointContext:
    """A checkpoint in progress. `abandoned`: its caller no longer waits."""

    services: Services
    sandbox: Sandbox
    container: Container
    abandoned: bool = False

    @property
    def work(self) -> Path:
        """Return the path of the checkpoint's work folder, on the disk of the writable layer. It
        holds CRIU's images and copies of the writable layer's files."""
        return self.services.paths.checkpoint_work(self.container.id)


async def checkpoint(services: Services, reference: str, location: str, timeout_s: int) -> None:
    """Checkpoint a running container into an archive at `location`, which only root can read. An
    existing file is replaced. `timeout_s` 0: no limit.

    Raises NotFound, InvalidArgument, WrongState (not running, no CRIU, a checkpoint is under way),
    Unsupported, DeadlineExceeded, PeerError with CRIU's log, ResourceExhausted, KernelError."""
    container = services.index.containers.get(reference)
    if timeout_s < 0:
        raise InvalidArgument(f"timeout {timeout_s} is negative")
    await asyncio.to_thread(_check_location, location)
    sandbox = services.index.sandboxes.get(container.sandbox_id)
    require(services, sandbox, container)
    context = CheckpointContext(services, sandbox, container)
    try:
        async with asyncio.timeout(timeout_s or None):
            await services.running.join(key(container), lambda: _checkpoint(context, location))
    except TimeoutError:
        context.abandoned = True
        raise DeadlineExceeded(
            f"the checkpoint of container {container.id} takes longer than {timeout_s} s"
        ) from None
    except asyncio.CancelledError:
        context.abandoned = True
        raise


def key(subject: Container | Sandbox) -> tuple[str, str]:
    """Return the key under which `services.running` has a running checkpoint of the container or
    sandbox `subject`."""
    return ("checkpoint", subject.id)


def _check_location(location: str) -> None:
    if not location.startswith("/") or "\0" in location or location.endswith("/"):
        raise InvalidArgument(f"location {location!r} is not the absolute path of a file")
    if os.path.isdir(location):
        raise InvalidArgument(f"location {location!r} is a directory")
    if not os.path.isdir(os.path.dirname(location)):
        raise InvalidArgument(f"location {location!r}: its directory does not exist")


def require(services: Services, sandbox: Sandbox, container: Container) -> None:
    """Raise WrongState unless all conditions for a checkpoint of the container hold:

    - CRIU is installed.
    - The server's own runtime runs the container, not an external one.
    - The container is running and not paused.
    - The pod has no user namespace.
    - No other checkpoint of the container or its pod is under way.
    """
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
    refuse_paused(container)
    if key(container) in services.running or key(sandbox) in services.running:
        raise WrongState(f"a checkpoint of container {container.id} is under way")
    handler = handlers.find(services.config, sandbox.runtime_handler)
    if handler is None or handler.binary:
        raise WrongState(
            f"container {container.id} belongs to the external runtime of handler"
            f" {sandbox.runtime_handler!r}: only pyrunc makes checkpoints"
        )
    if namespaces.has_user_namespace(sandbox.options):
        raise WrongState(
            f"container {container.id} has a user namespace: CRIU could not restore it, because it"
            " would make a new user namespace, which does not own another pod's network namespace"
        )
    require_criu()


def require_criu() -> None:
    """Raise WrongState if CRIU is not installed."""
    try:
        criu.find()
    except NotFound as error:
        raise WrongState(error.message) from None


async def _checkpoint(context: CheckpointContext, location: str) -> None:
    folder, name = os.path.split(location)
    # In the folder of the target, because rename(2) does not cross filesystems.
    target = f"{folder}/.{name[:200]}.{secrets.token_hex(6)}"
    with context.sandbox.gate:
        await asyncio.to_thread(make_work, context.work, target)
        try:
            async with context.container.lock:
                require_running(context.container)
                try:
                    await freeze(context.container)
                    await capture(context)
                finally:
                    thaw(context.container)
            await pack(context, target)
            await asyncio.to_thread(_publish, context, target, location)
        finally:
            await asyncio.to_thread(remove_path, context.work)


def _publish(context: CheckpointContext, target: str, location: str) -> None:
    if context.abandoned:
        os.unlink(target)
        return
    try:
        os.rename(target, location)
    except OSError as error:
        os.unlink(target)
        raise disk_error(error, "rename", location) from None


def make_work(work: Path, target: str) -> None:
    """Create a checkpoint's work folder; first remove one that a killed server has left. A file in
    the new folder records the archive's path `target`: if the server is killed, its next start
    removes the archive. Raises ResourceExhausted, KernelError."""
    with disk_errors("mkdir", str(work)):
        remove_path(work)
        work.mkdir(mode=0o700)
        (work / UNFINISHED).write_bytes(os.fsencode(target))


def require_running(container: Container) -> None:
    """Raise WrongState if the container has exited or is paused. The caller must hold the
    container's lock."""
    if not container.running:
        raise WrongState(f"container {container.id} has exited")
    refuse_paused(container)


def thaw(container: Container) -> None:
    """Thaw the container; does nothing if it has exited. Raises KernelError."""
    groups.place(container.cgroups_path, container.id).thaw()


async def capture(context: CheckpointContext) -> None:
    """Write CRIU's images, the writable layer and the checkpoint's metadata files into the work
    folder. The container must be frozen. Raises Error."""
    services = context.services
    container = context.container
    work = context.work
    mounts = await services.images.mounts([container.image_id])
    arguments = TakeDump(
        directory=str(services.paths.container_state(container.id)),
        upper=str(services.paths.container_root(container.id) / "upper"),
        work=str(work),
        volumes=await asyncio.to_thread(_volumes, services, container),
        images=[mount.index for mount in mounts],
    )
    captured_at_ns = time.time_ns()
    await run(services, DUMP, arguments, [mount.fd for mount in mounts])
    documents = describe.files(container, captured_at_ns, context.sandbox.runtime_handler)
    await asyncio.to_thread(_write, work, {name: json.dumps(d) for name, d in documents.items()})


def _volumes(services: Services, container: Container) -> dict[str, str]:
    """Return the host folder of each volume that the image declares, by the volume's path in the
    container."""
    own = str(services.paths.container_root(container.id) / anonymous_volumes.FOLDER)
    spec = atomic_file.read_json(str(services.paths.container_state(container.id) / "config.json"))
    sources = ((mount["destination"], mount.get("source", "")) for mount in spec["mounts"])
    return {place: source for place, source in sources if source.startswith(f"{own}/")}


def _write(folder: Path, documents: dict[str, str]) -> None:
    with disk_errors("write", str(folder)):
        for name, content in documents.items():
            (folder / name).write_text(content, encoding="utf-8")


async def pack(context: CheckpointContext, target: str) -> None:
    """Write the archive to `target`, a new file. Raises Error."""
    await run(context.services, PACK, Pack(str(context.work), target))


async def run(services: Services, job: str, arguments: Record, fds: Sequence[int] = ()) -> None:
    """Run a checkpoint job to its end. Raises the job's error, or PeerError if its exit code is not
    0."""
    result = await services.zygote.run(job, arguments, fds, timeout_s=CRIU_TIMEOUT_S)
    result.require_success(job)
