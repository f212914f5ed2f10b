"""Writes and deletes the records and folders of pods and containers, in threads, because a disk may
be slow or full.

A call that creates or changes an object is answered only after the object's record is synced (fsync
of file and folder). So after a power cut the server lists the earlier pods as stopped, with their
logs and attempts, and releases what their network plugins have reserved. A removal is not synced.
If a removed record reappears after a power cut, its object is listed as stopped and kubelet removes
it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from cri_server.operations.tasks import finish_in_thread
from cri_server.store.facts import entries
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from cri_server.store.records import ContainerRecord, SandboxRecord
from cri_server.store.trash import Trash
from pyrunc import atomic_file
from pyrunc.atomic_file import DamagedRecord
from pyrunc.errors import NotFound
from pyrunc.kernel.full import disk_errors
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

SANDBOX_VERSION = 1
CONTAINER_VERSION = 1


async def save_sandbox(paths: Paths, sandbox: Sandbox) -> None:
    """Write the sandbox's record. Raises NotFound if the sandbox was removed meanwhile,
    ResourceExhausted on a full disk, KernelError for another failure to write.

    For a stopped sandbox the folder is not synced: after a power cut all sandboxes are stopped, so
    the old record is as good as the new one.
    """
    named = sandbox.phase != "stopped"
    await _save(paths.sandbox_record(sandbox.id), sandbox, SANDBOX_VERSION, named=named)


async def save_stopped(paths: Paths, sandbox: Sandbox) -> None:
    """Record in the state directory, a tmpfs, that the sandbox was stopped and its network
    released. Raises the errors of `save_sandbox`.

    Makes an empty file, without waiting for a disk. A power cut removes this file, but also stops
    all pods. If the file cannot be made (the sandbox is of an earlier boot, or the tmpfs is full),
    writes the record instead.
    """
    try:
        paths.sandbox_stopped(sandbox.id).touch(mode=0o600)
    except OSError as error:
        log.debug("%s", error)
        await save_sandbox(paths, sandbox)


async def save_container(paths: Paths, container: Container) -> None:
    """Write the container's record. Raises NotFound if the container was removed meanwhile,
    ResourceExhausted on a full disk, KernelError for another failure to write."""
    await _save(paths.container_record(container.id), container, CONTAINER_VERSION)


def read_sandbox(path: Path, paths: Paths) -> Sandbox:
    """Return the sandbox of the record at `path`. The sandbox is `stopped` if the record says so,
    or if the empty file of `save_stopped` exists. Raises NotFound without a record, DamagedRecord
    for an invalid or newer record, OSError for one that cannot be read."""
    sandbox = Sandbox.from_record(SandboxRecord.of(atomic_file.read_json(str(path)), DamagedRecord))
    if paths.sandbox_stopped(sandbox.id).exists():
        sandbox.phase = "stopped"
        sandbox.network = "host" if sandbox.host_network else "released"
    return sandbox


def read_container(path: Path) -> Container:
    """Return the container of the record at `path`. Raises NotFound without a record, DamagedRecord
    for an invalid or newer record, OSError for one that cannot be read."""
    return Container.from_record(
        ContainerRecord.of(atomic_file.read_json(str(path)), DamagedRecord)
    )


async def _save(
    path: Path, subject: Sandbox | Container, version: int, *, named: bool = True
) -> None:
    async with subject.on_disk:
        # A save that waited here would bring back the record of an object that was removed
        # meanwhile.
        if subject.removed:
            raise NotFound(f"{subject.id} was removed meanwhile")
        # Encoded under the lock: the threads of two saves may run in any order, and the later state
        # must stay.
        content = subject.to_record().to_fields()

        def write() -> None:
            # The call that makes a new record is not answered yet, so recovery may drop the record
            # if it is not whole.
            is_new = not path.exists()
            atomic_file.write_json(
                str(path), content, version=version, durable=True, named=named, named_first=is_new
            )

        # With its syncs a record takes 0.7 ms on an idle disk, and 7 to 14 ms on a busy one.
        await write_in_thread(write, path)


async def remove_sandbox(paths: Paths, trash: Trash, sandbox: Sandbox) -> None:
    """Move the sandbox's record and its folder in the root directory to the trash, and delete its
    state folder. A save that runs at the same time does not bring the record back. Raises
    KernelError."""
    root, state = paths.sandbox_root(sandbox.id), paths.sandbox_state(sandbox.id)
    await _remove(sandbox, paths.sandbox_record(sandbox.id), trash, root, state)


async def remove_container(paths: Paths, trash: Trash, container: Container) -> None:
    """Move the container's record and writable layer to the trash, and delete its state folder. A
    save that runs at the same time does not bring the record back. Raises KernelError."""
    root, state = paths.container_root(container.id), paths.container_state(container.id)
    await _remove(container, paths.container_record(container.id), trash, root, state)


async def _remove(
    subject: Sandbox | Container, record: Path, trash: Trash, root: Path, state: Path
) -> None:
    # Set before the lock is taken, so that saves which wait for the lock fail.
    subject.removed = True

    def remove() -> None:
        with disk_errors("write", str(record)):
            try:
                # The record goes to the trash with the folder. On a disk with `discard` unlink(2)
                # of a synced file takes 0.3 to 2 ms, until its blocks are free.
                record.rename(root / record.name)
            except OSError:  # the folder or the record is missing, or the disk is full
                record.unlink(missing_ok=True)
        _delete(trash, root, state)

    async with subject.on_disk:
        await finish_in_thread(remove)
    trash.empty_soon()


async def write_in_thread(work: Callable[[], object], path: Path) -> None:
    """Run `work` in a thread, and wait for its end even when cancelled. Converts an OSError to
    ResourceExhausted or KernelError; the message names the error's file, or else `path`."""
    with disk_errors("write", str(path)):
        await finish_in_thread(work)


async def remove_record(path: Path) -> None:
    """Unlink a record; does nothing if it is missing."""
    await asyncio.to_thread(path.unlink, missing_ok=True)


async def delete_sandbox_folders(paths: Paths, trash: Trash, identifier: str) -> None:
    """Move the sandbox's folder in the root directory to the trash, then delete its state folder.
    This order lets a restarted server find an unfinished sandbox by its state folder. Raises
    KernelError."""
    root, state = paths.sandbox_root(identifier), paths.sandbox_state(identifier)
    await asyncio.to_thread(_delete, trash, root, state)
    trash.empty_soon()


async def delete_container_folders(paths: Paths, trash: Trash, identifier: str) -> None:
    """Move the container's writable layer to the trash, then delete its state folder. Raises
    KernelError."""
    root, state = paths.container_root(identifier), paths.container_state(identifier)
    await asyncio.to_thread(_delete, trash, root, state)
    trash.empty_soon()


def _delete(trash: Trash, root: Path, state: Path) -> None:
    """Move the folder `root` to the trash, then delete the folder `state`. A missing folder is no
    error."""
    with disk_errors("rmdir", str(root)):
        trash.take(root)
    with disk_errors("rmdir", str(state)):
        remove_path(state)


def records_in(folder: Path) -> list[str]:
    """Return the ids of the objects that have a record in `folder`."""
    return [name.removesuffix(".json") for name in entries(folder) if name.endswith(".json")]
