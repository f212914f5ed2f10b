"""CheckpointContainer: CRIU writes what the container's processes are, and they go on; the archive
is at `location` whole or not at all.

The container stands still, by its freezer, while its processes and its writable layer are captured,
so that they fit together, and runs again while the archive is written. CRIU, once begun, is never
killed: it works inside of the container's processes. When the time is up the caller hears so, and
what is made all the same is removed when it is done.
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
from cri_server.checkpoints.dump import DUMP, PACK, Pack, TakeDump
from cri_server.checkpoints.names import UNFINISHED
from cri_server.config import handlers
from cri_server.containers import anonymous_volumes
from cri_server.containers.pause import refuse_paused
from cri_server.operations.tasks import shield_until_done
from cri_server.services import Services
from cri_server.spec import groups, namespaces
from cri_server.store.model import Container, Sandbox
from pyrunc import atomic_file
from pyrunc.checkpoint import criu
from pyrunc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KernelError,
    NotFound,
    PeerError,
    WrongState,
)
from pyrunc.kernel import cgroup as tree
from pyrunc.kernel.full import disk_error, disk_errors
from pyrunc.kernel.tree import remove_path
from pyrunc.records import Record

PATIENCE_S = 1800.0  # with CRIU, or a disk: meanwhile the container cannot be stopped


@dataclass(slots=True)
class Job:
    """A checkpoint that is being made. `given_up`: nobody waits for it any more."""

    services: Services
    sandbox: Sandbox
    container: Container
    given_up: bool = False

    @property
    def work(self) -> Path:
        """Where its parts are: on the disk of the writable layer."""
        return self.services.paths.checkpoint_work(self.container.id)


async def checkpoint(services: Services, reference: str, location: str, timeout_s: int) -> None:
    """Write the archive of a running container, for root only, in place of what is there.
    `timeout_s` 0: as long as it takes.

    Raises NotFound, InvalidArgument, WrongState (not running, no CRIU, a checkpoint is under way),
    Unsupported, DeadlineExceeded, PeerError with what CRIU logged, ResourceExhausted, KernelError.
    """
    container = services.index.containers.get(reference)
    if timeout_s < 0:
        raise InvalidArgument(f"timeout {timeout_s} is negative")
    await asyncio.to_thread(_check_location, location)
    sandbox = services.index.sandboxes.get(container.sandbox_id)
    require(services, sandbox, container)
    job = Job(services, sandbox, container)
    try:
        async with asyncio.timeout(timeout_s or None):
            await services.running.join(key(container), lambda: _checkpoint(job, location))
    except TimeoutError:
        job.given_up = True
        raise DeadlineExceeded(
            f"the checkpoint of container {container.id} takes longer than {timeout_s} s"
        ) from None
    except asyncio.CancelledError:
        job.given_up = True
        raise


def key(of: Container | Sandbox) -> tuple[str, str]:
    """By which `services.running` knows a checkpoint."""
    return ("checkpoint", of.id)


def _check_location(location: str) -> None:
    if not location.startswith("/") or "\0" in location or location.endswith("/"):
        raise InvalidArgument(f"location {location!r} is not an absolute path of a file")
    if os.path.isdir(location):
        raise InvalidArgument(f"location {location!r} is a directory")
    if not os.path.isdir(os.path.dirname(location)):
        raise InvalidArgument(f"location {location!r}: there is no such directory")


def require(services: Services, sandbox: Sandbox, container: Container) -> None:
    """Whether a checkpoint of the container can begin. Raises WrongState."""
    if not container.running:
        raise WrongState(f"container {container.id} is not running")
    refuse_paused(container)
    if key(container) in services.running or key(sandbox) in services.running:
        raise WrongState(f"a checkpoint of container {container.id} is under way")
    handler = handlers.find(services.config, sandbox.runtime_handler)
    if handler is None or handler.binary:
        raise WrongState(
            f"container {container.id} is run by another runtime, handler {sandbox.runtime_handler!r}: only our own makes checkpoints"
        )
    if namespaces.has_user_namespace(sandbox.options):
        raise WrongState(
            f"container {container.id} has a user namespace: CRIU could not restore it, for it would make one of its own, to which the "
            "network of another pod does not belong"
        )
    require_criu()


def require_criu() -> None:
    """Raises WrongState where CRIU is not installed."""
    try:
        criu.find()
    except NotFound as error:
        raise WrongState(error.message) from None


async def _checkpoint(job: Job, location: str) -> None:
    folder, name = os.path.split(location)
    target = f"{folder}/.{name[:200]}.{secrets.token_hex(6)}"
    with job.sandbox.gate:
        await asyncio.to_thread(make_work, job.work, target)
        try:
            async with job.container.lock:
                require_running(job.container)
                try:
                    await freeze(job.container)
                    await capture(job)
                finally:
                    thaw(job.container)
            await pack(job, target)
            await asyncio.to_thread(_publish, job, target, location)
        finally:
            await asyncio.to_thread(remove_path, job.work)


def _publish(job: Job, target: str, location: str) -> None:
    if job.given_up:
        os.unlink(target)
        return
    try:
        os.rename(target, location)
    except OSError as error:
        os.unlink(target)
        raise disk_error(error, "rename", location) from None


def make_work(work: Path, target: str) -> None:
    """The folder of a checkpoint's parts. What a server that was killed has left goes first. Raises
    ResourceExhausted, KernelError."""
    with disk_errors("mkdir", str(work)):
        remove_path(work)
        work.mkdir(mode=0o700)
        (work / UNFINISHED).write_bytes(os.fsencode(target))


def require_running(container: Container) -> None:
    """As it is when its turn has come. Raises WrongState."""
    if not container.running:
        raise WrongState(f"container {container.id} has exited")
    refuse_paused(container)


async def freeze(container: Container) -> None:
    """Returns when every process stands still, and not before that is decided: whoever is cancelled
    thaws it afterwards.

    Raises WrongState, DeadlineExceeded, KernelError.
    """
    try:
        await shield_until_done(
            asyncio.to_thread(groups.place(container.cgroups_path, container.id).freeze)
        )
    except KernelError as error:
        if error.errno in tree.GONE:
            raise WrongState(f"container {container.id} has exited") from None
        raise


def thaw(container: Container) -> None:
    """Let it run on; fine when it has exited. Raises KernelError."""
    try:
        groups.place(container.cgroups_path, container.id).thaw()
    except KernelError as error:
        if error.errno not in tree.GONE:
            raise


async def capture(job: Job) -> None:
    """CRIU's images, the writable layer and what the container is, into the job's folder; it stands
    still. Raises Error."""
    services, container, work = job.services, job.container, job.work
    mounts = await services.images.mounts([container.image_id])
    wanted = TakeDump(
        directory=str(services.paths.container_state(container.id)),
        upper=str(services.paths.container_root(container.id) / "upper"),
        work=str(work),
        volumes=await asyncio.to_thread(_volumes, services, container),
        images=[mount.index for mount in mounts],
    )
    captured_at_ns = time.time_ns()
    await run(services, DUMP, wanted, [mount.fd for mount in mounts])
    documents = describe.files(container, captured_at_ns, job.sandbox.runtime_handler)
    await asyncio.to_thread(_write, work, {name: json.dumps(d) for name, d in documents.items()})


def _volumes(services: Services, container: Container) -> dict[str, str]:
    """The folders that the image declares as volumes, by their places."""
    own = str(services.paths.container_root(container.id) / anonymous_volumes.FOLDER)
    spec = atomic_file.read_json(str(services.paths.container_state(container.id) / "config.json"))
    sources = ((mount["destination"], mount.get("source", "")) for mount in spec["mounts"])
    return {place: source for place, source in sources if source.startswith(f"{own}/")}


def _write(folder: Path, documents: dict[str, str]) -> None:
    with disk_errors("write", str(folder)):
        for name, content in documents.items():
            (folder / name).write_text(content, encoding="utf-8")


async def pack(job: Job, target: str) -> None:
    """The archive at `target`, a new file. Raises Error."""
    await run(job.services, PACK, Pack(str(job.work), target))


async def run(services: Services, errand: str, arguments: Record, fds: Sequence[int] = ()) -> None:
    """Raises what the errand raises, PeerError for one that fails without words."""
    result = await services.jobs.run(errand, arguments, fds, timeout_s=PATIENCE_S)
    if result.exit_code:
        said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise PeerError(f"{errand} failed with exit code {result.exit_code}: {said[:300]}")
