"""Records and folders on disk. Writing may wait for a slow or full disk, so it happens in threads; deletion allocates
nothing and its depth does not depend on what a container left there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import stat
from pathlib import Path

from cri_server.store.facts import entries
from cri_server.store.model import Container, Sandbox
from cri_server.store.paths import Paths
from pyrunc import record
from pyrunc.errors import KernelError, ResourceExhausted

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
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
    """An OSError on one of our own files as an error of ours."""
    if error.errno in FULL:
        return ResourceExhausted(f"{call} {path}: no space left on the device")
    return KernelError(call, repr(path), error.errno or 0)


async def forget(path: Path) -> None:
    """Unlink a record; fine when it is gone."""
    await asyncio.to_thread(path.unlink, missing_ok=True)


async def delete_tree(path: Path) -> None:
    """Delete a folder and all below, in a thread; fine when it is gone. Raises KernelError."""
    try:
        await asyncio.to_thread(remove_tree, path)
    except OSError as error:
        raise worded(error, "rmdir", str(path)) from None


def remove_tree(path: Path) -> None:
    """Delete `path` without recursion: a folder found inside is moved up beside the others, so that the tree is never
    deeper than two levels and never named by a path of the container's making. Symlinks are not followed."""
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(path)
        return
    try:
        _flatten(top)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _flatten(top: int) -> None:
    """What somebody else removes meanwhile (a shim that ends) is gone as well."""
    while names := os.listdir(top):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                _remove(name, top)


def _remove(name: str, top: int) -> None:
    if not _is_folder(name, top):
        os.unlink(name, dir_fd=top)
        return
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for child in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if _is_folder(child, folder):
                    os.rename(child, f".{os.urandom(12).hex()}", src_dir_fd=folder, dst_dir_fd=top)
                else:
                    os.unlink(child, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _is_folder(name: str, folder: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def records_in(folder: Path) -> list[str]:
    """The ids that have a record in `folder`."""
    return [name.removesuffix(".json") for name in entries(folder) if name.endswith(".json")]
