"""Recovery at the server's start: reads the records, queries the shims, and completes or drops
unfinished operations.

States are derived from records and processes. A container that exited while no server ran has an
exit.json. Containers whose shim is gone are ended if no other shim can take them over. After a
reboot all containers count as exited. A damaged record is renamed; the server starts without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cri_server.checkpoints.names import UNFINISHED
from cri_server.pod import orphans, unfinished
from cri_server.pod.processes import ANSWER_S
from cri_server.services import Services
from cri_server.spec import groups
from cri_server.store import disk
from cri_server.store.facts import boot_time_ns, entries
from cri_server.store.model import Container, Exit, Sandbox
from pyrunc import atomic_file
from pyrunc.errors import Error, WrongState
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

Object = TypeVar("Object", Sandbox, Container)


def load(services: Services) -> list[str]:
    """Fill the server's index from the records. Return the ids of containers whose sandbox has no
    readable record. If a newer version has written one of the records, raises WrongState before any
    change."""
    paths = services.paths
    sandboxes = _read(paths.sandbox_records, partial(disk.read_sandbox, paths=paths))
    containers = _read(paths.container_records, disk.read_container)
    for folder in (paths.sandbox_records, paths.container_records):
        atomic_file.remove_leftovers(str(folder))
    for sandbox in _readable(sandboxes):
        services.index.sandboxes.add(sandbox)
    without_sandbox = []
    for container in _readable(containers):
        if services.index.sandboxes.find(container.sandbox_id) is None:
            without_sandbox.append(container.id)
        else:
            services.index.containers.add(container)
    return without_sandbox


async def recover(services: Services, without_sandbox: list[str]) -> None:
    """Query the shims of the sandboxes that `load` has read. Drop sandboxes and containers whose
    creation or removal was interrupted, and the containers `without_sandbox`. An error in one of
    them is logged and does not affect the others."""
    await _for_each(_recover_sandbox, services, services.index.sandboxes)
    await _for_each(drop_sandbox, services, unfinished_sandboxes(services))
    await _for_each(drop_container, services, {*without_sandbox, *unfinished_containers(services)})
    await services.shims.drop_unknown()
    log.info(
        "recovered %d sandboxes and %d containers",
        len(services.index.sandboxes),
        len(services.index.containers),
    )


def live_networks(services: Services) -> list[str]:
    """Return the ids of sandboxes that have a network attachment or are being created."""
    attached = [s.id for s in services.index.sandboxes if s.network == "attached"]
    return attached + list(services.pending)


def _read(folder: Path, read: Callable[[Path], Object]) -> dict[Path, Object | Exception]:
    """Read the records in `folder`; return each file's object, or the error of reading it. Raises
    WrongState for a record of a newer version."""
    objects: dict[Path, Object | Exception] = {}
    for identifier in disk.records_in(folder):
        path = folder / f"{identifier}.json"
        try:
            item = read(path)
            if item.id != identifier:
                raise atomic_file.DamagedRecord(
                    f"{path}: the record has the id of another object, {item.id!r}"
                )
            objects[path] = item
        except atomic_file.NewerRecord as error:
            raise WrongState(f"a newer version of pyrunc-cri has written {error}") from None
        except (Error, OSError) as error:
            objects[path] = error
    return objects


def _readable(objects: dict[Path, Object | Exception]) -> list[Object]:
    """Return the objects that could be read. Delete the empty records, which a power cut has left.
    Rename all other unreadable records to ID.damaged."""
    for path, item in objects.items():
        if isinstance(item, Exception):
            _put_aside(path, item)
    return [item for item in objects.values() if not isinstance(item, Exception)]


def _put_aside(path: Path, reason: Exception) -> None:
    try:
        if atomic_file.is_unwritten(path):
            log.info("removed the empty record %s: a power cut interrupted its creation", path)
            path.unlink()
            return
        log.error("the damaged record of %s was set aside: %s", path.stem, reason)
        # The file stays for the administrator, who may restore it; `doctor` reports it.
        path.rename(path.with_suffix(".damaged"))
    except OSError as error:
        log.error("cannot set aside or remove the damaged record %s: %s", path, error)


async def _for_each(work: Callable[..., Any], services: Services, subjects: Iterable[Any]) -> None:
    """Run `work` concurrently for each of `subjects`; log its errors."""
    await asyncio.gather(*(_guarded(work, services, subject) for subject in subjects))


async def _guarded(work: Callable[..., Any], services: Services, subject: Any) -> None:
    try:
        await work(services, subject)
    except Exception as error:
        log.exception("recovery of %s failed: %s", getattr(subject, "id", subject), error)


async def _recover_sandbox(services: Services, sandbox: Sandbox) -> None:
    containers = services.index.containers_of(sandbox)
    for container in containers:
        orphans.read_records(services.paths, container)
    # Pids, mounts and sockets in records of an earlier boot mean nothing, and a pid may be another
    # process now.
    if sandbox.boot_id != services.node.boot_id:
        for container in containers:
            if container.exit is None:
                container.set_exit(Exit.unknown(boot_time_ns()))
        return
    await services.shims.reach(sandbox)
    for container in containers:
        await asyncio.to_thread(_end_checkpoint, services, container)


def _end_checkpoint(services: Services, container: Container) -> None:
    """Remove a checkpoint that the server's death interrupted, and thaw its container."""
    work = services.paths.checkpoint_work(container.id)
    try:
        target = (work / UNFINISHED).read_bytes()
    except OSError:
        return
    if container.running:
        groups.place(container.cgroups_path, container.id).thaw()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    remove_path(work)
    log.info("container %s: its unfinished checkpoint was removed", container.id)


def unfinished_sandboxes(services: Services) -> list[str]:
    """Return the ids of sandboxes with folders but no record. No client knows these ids."""
    paths, sandboxes = services.paths, services.index.sandboxes
    ids = _ids_with_folders(paths.sandbox_states, paths.sandbox_records)
    return [name for name in ids if sandboxes.find(name) is None]


def unfinished_containers(services: Services) -> list[str]:
    """Return the ids of containers with folders but no record."""
    paths, containers = services.paths, services.index.containers
    ids = _ids_with_folders(paths.container_states, paths.container_records)
    return [name for name in ids if containers.find(name) is None]


def _ids_with_folders(states: Path, records: Path) -> set[str]:
    """Return the ids of objects that have a folder in `states` or in `records`. In `records`, skip
    the record files beside the folders."""
    return {*entries(states), *(name for name in entries(records) if "." not in name)}


async def drop_sandbox(services: Services, identifier: str) -> None:
    """Remove what an unfinished RunPodSandbox has left: processes, network and folders."""
    detach = partial(_detach, services, identifier)
    await unfinished.end_sandbox(services.paths, identifier, detach)
    await disk.delete_sandbox_folders(services.paths, services.trash, identifier)
    log.info("removed the partly created sandbox %s", identifier)


async def _detach(services: Services, identifier: str, netns_path: str | None) -> None:
    """Detach the sandbox's network. A plugin that fails or hangs is only logged."""
    # A hanging plugin must not delay the start; `network.reconcile` calls it again.
    try:
        async with asyncio.timeout(ANSWER_S):
            await services.network.detach(identifier, netns_path)
    except (Error, TimeoutError) as error:
        reason = str(error) or "timed out"
        log.warning(
            "cannot detach the network of the partly created sandbox %s: %s", identifier, reason
        )


async def drop_container(services: Services, identifier: str) -> None:
    """Remove a container that an interrupted creation or removal has left: it has no record, or its
    sandbox does not exist."""
    await unfinished.end_container(services.paths, identifier)
    await disk.remove_record(services.paths.container_record(identifier))
    await disk.delete_container_folders(services.paths, services.trash, identifier)
    log.info("removed the remains of container %s", identifier)
