"""Records and folders on disk. Writing and deleting may wait for a slow or full disk, so both happen in threads."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from cri_server.store.facts import entries
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from pyrunc import record
from pyrunc.errors import KernelError, ResourceExhausted
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)

SANDBOX_VERSION = 1
CONTAINER_VERSION = 1


async def save_sandbox(paths: Paths, sandbox: Sandbox) -> None:
    """Write the record. Raises ResourceExhausted, KernelError."""
    await _save(paths.sandbox_record(sandbox.id), sandbox.to_record(), SANDBOX_VERSION)


async def save_container(paths: Paths, container: Container) -> None:
    """Write the record. Raises ResourceExhausted, KernelError."""
    await _save(paths.container_record(container.id), container.to_record(), CONTAINER_VERSION)


async def _save(path: Path, content: dict[str, object], version: int) -> None:
    try:
        await asyncio.to_thread(record.write_json, str(path), content, version=version)
    except OSError as error:
        raise worded(error, "write", str(path)) from None


def worded(error: OSError, call: str, path: str) -> ResourceExhausted | KernelError:
    """An OSError on one of our own files as an error of ours, about the file that the error names, else `path`."""
    named = error.filename
    place = named if isinstance(named, str) and os.path.isabs(named) else path
    if error.errno in FULL:
        return ResourceExhausted(f"{call}: {reason(error.errno, place)}")
    return KernelError(call, repr(place), error.errno or 0)


async def forget(path: Path) -> None:
    """Unlink a record; fine when it is gone."""
    await asyncio.to_thread(path.unlink, missing_ok=True)


async def delete_sandbox_folders(paths: Paths, identifier: str) -> None:
    """Delete its folders on both sides with all below; the state, by which an unfinished one is found, last. Raises KernelError."""
    await asyncio.to_thread(_delete_trees, paths.sandbox_root(identifier), paths.sandbox_state(identifier))


async def delete_container_folders(paths: Paths, identifier: str) -> None:
    """As `delete_sandbox_folders`. Raises KernelError."""
    await asyncio.to_thread(
        _delete_trees, paths.container_root(identifier), paths.container_state(identifier)
    )


def _delete_trees(*folders: Path) -> None:
    """In this order; fine when they are gone."""
    for folder in folders:
        try:
            remove_path(folder)
        except OSError as error:
            raise worded(error, "rmdir", str(folder)) from None


def records_in(folder: Path) -> list[str]:
    """The ids that have a record in `folder`."""
    return [name.removesuffix(".json") for name in entries(folder) if name.endswith(".json")]
