"""Removes files, cgroups and mounts that no record refers to, and reports for each object why it
was removed or kept.

The server's start and each removal delete their own leftovers. So garbage comes only from a full or
failing disk, a power cut or an older version.

The files of a running operation are safe. The collector lists the names that no record refers to,
and waits until no operation runs. It then removes those listed names that still have no record.
Later operations use new names.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cri_server.api import api_pb2 as api
from cri_server.images.model import Image
from cri_server.images.store.unused import size_of
from cri_server.recovery import (
    drop_container,
    drop_sandbox,
    live_networks,
    unfinished_containers,
    unfinished_sandboxes,
)
from cri_server.services import Services
from cri_server.store.facts import entries
from cri_server.store.garbage_item import GarbageItem
from pyrunc.atomic_file import ENDING
from pyrunc.errors import Error
from pyrunc.kernel.tree import remove_path

PLAIN_ID = re.compile(r"[0-9a-f]{64}")
PATIENCE_S = 10.0  # to wait for a moment without operations
INTERVAL_S = 0.05
KNOWN_NAMES = {
    "server.lock",
    "server.json",
    "sandboxes",
    "containers",
    "images",
    "network",
    "timeline",
    "trash",
    "installed.json",
    "keeper.lock",
    "keeper.sock",
    "shims",
    "earlier-shims",
    "pods",
}
RUN_FOLDERS, RUN_OWNER = "pods", "pod"
"""`pyrunc-cri run` makes a folder below RUN_FOLDERS for the pod's logs and volumes, and in this
folder the file RUN_OWNER with the pod's id."""
DOCTOR, DOCTOR_AGE_S = ".doctor-", 3600.0  # the folder in which doctor tries an overlay
BUSY = "a running operation may own it"
NAMES_SHOWN = 3

Action = Literal["keep", "remove", "removed", "convert", "converted", "failed"]


async def collect(
    services: Services, *, dry_run: bool, images: bool, force: bool = False
) -> list[GarbageItem]:
    """Remove files, cgroups and mounts that no record refers to; return an item for each examined
    object.

    `images`: also remove images that no container uses. `force`: also release the addresses of lost
    pods whose CNI plugins fail in DEL. `dry_run`: report only.
    """
    collector = _GarbageCollector(services, dry_run)
    await collector.images(images)
    await collector.store()
    await collector.records()
    await collector.network(force)
    return collector.items


class _GarbageCollector:
    def __init__(self, services: Services, dry_run: bool) -> None:
        self._services, self._dry_run = services, dry_run
        self.items: list[GarbageItem] = []

    def _report(self, action: Action, kind: str, name: str, why: str, size_bytes: int = 0) -> None:
        self.items.append(GarbageItem(kind, name, action, why, size_bytes))

    def _keep(self, kind: str, name: str, why: str, size_bytes: int = 0) -> None:
        self._report("keep", kind, name, why, size_bytes)

    async def _remove(
        self, kind: str, name: str, why: str, size_bytes: int, remove: Callable[[], Any]
    ) -> None:
        """Remove an object with `remove`, and report it; in a dry run only report it. A failure is
        reported, too, and not raised."""
        if self._dry_run:
            self._report("remove", kind, name, why, size_bytes)
            return
        try:
            await remove()
        except (Error, OSError) as error:
            self._report("failed", kind, name, f"{why}, but {error}", size_bytes)
        else:
            self._report("removed", kind, name, why, size_bytes)

    async def images(self, unused: bool) -> None:
        for image in await self._services.images.list():
            name = ", ".join(image.repo_tags or image.repo_digests or [image.id])
            why = self._reason_to_keep(image)
            if (why or not unused) and self._services.images.to_convert(image.id):
                await self._convert(image, name)
            elif why or not unused:
                self._keep(
                    "image",
                    name,
                    why or "no container uses it; --images removes it",
                    image.size_bytes,
                )
            else:
                await self._remove(
                    "image", name, "no container uses it", image.size_bytes,
                    partial(self._services.images.remove, image.id),
                )  # fmt: skip

    async def _convert(self, image: Image, name: str) -> None:
        """Convert an image to the form that `[images] store` requires: mounted or unpacked. Keep an
        image that a container uses. Report the image as `name`; in a dry run do nothing else."""
        images, index = self._services.images, self._services.index
        why = f"[images] store requires it {images.to_convert(image.id)}"
        try:
            done = not index.users_of(image.id) and (
                self._dry_run or await images.convert(image.id)
            )
        except (Error, OSError) as error:
            self._report("failed", "image", name, f"{why}, but {error}", image.size_bytes)
            return
        if done:
            action: Action = "convert" if self._dry_run else "converted"
            self._report(action, "image", name, why, image.size_bytes)
        else:
            reason = self._reason_to_keep(image) or "a container of it is being created"
            self._keep(
                "image",
                name,
                f"{reason}; converted when unused, because {why}",
                image.size_bytes,
            )

    def _reason_to_keep(self, image: Image) -> str:
        users = self._services.index.users_of(image.id)
        if users:
            more = f" and {len(users) - NAMES_SHOWN} more" if len(users) > NAMES_SHOWN else ""
            return f"used by {', '.join(u[:12] for u in users[:NAMES_SHOWN])}{more}"
        return "pinned ([images] pinned)" if image.pinned else ""

    async def store(self) -> None:
        """Remove blobs, layers and downloads that neither an image nor a running pull uses."""
        for entry in await self._services.images.unused():
            if entry.kind == "unknown":
                self._unknown(entry.path, entry.size_bytes)
                continue
            action: Action = "remove" if self._dry_run else "removed"
            why = _WHY[entry.kind]
            if not self._dry_run and not await self._services.images.discard(entry):
                action, why = "keep", "a running pull needs it"
            self._report(action, entry.kind, entry.path.name, why, entry.size_bytes)

    def _unknown(self, path: Path, size_bytes: int) -> None:
        why = "a damaged file that was set aside: inspect it, then remove it by hand"
        if ".damaged" not in path.name:
            why = "unknown to this version; remove it by hand"
        self._keep("unknown", str(path), why, size_bytes)

    async def records(self) -> None:
        services, paths = self._services, self._services.paths
        for sandbox in services.index.sandboxes:
            metadata = sandbox.config.metadata
            ready = sandbox.state == api.SANDBOX_READY
            why = "it is ready" if ready else "it is stopped: kubelet or `pyrunc-cri rm` removes it"
            if not ready and sandbox.phase != "ready" and sandbox.network == "attached":
                why = (
                    "it is stopped, but its network is not detached: kubelet or `pyrunc-cri rm` "
                    "tries again; `pyrunc-cri rm --force` removes it all the same"
                )
            self._keep("pod", f"{metadata.namespace}/{metadata.name} {sandbox.id[:12]}", why)
        for container in services.index.containers:
            enum_name = api.ContainerState.Name(container.state)  # type: ignore[arg-type]
            state = enum_name.removeprefix("CONTAINER_").lower()
            why = f"it is {state}" + (
                ": kubelet keeps it for its log and exit code" if container.exit else ""
            )
            self._keep("container", f"{container.config.metadata.name} {container.id[:12]}", why)
        # Listed before the idle moment: a name that appears later belongs to a later operation.
        sandboxes, containers, files = self._list()
        idle = await self._idle()
        await self._unfinished("pod", sandboxes, idle, unfinished_sandboxes, drop_sandbox)
        await self._unfinished("container", containers, idle, unfinished_containers, drop_container)
        for path in files:
            await self._file(path, idle)
        for path in [paths.trash / name for name in await services.trash.wait_deleted(PATIENCE_S)]:
            size = await asyncio.to_thread(size_of, path)
            await self._remove(
                "folder", str(path), _WHY["trash"], size, partial(_remove_tree, path)
            )
        for folder in (paths.root, paths.state):
            for name in sorted(set(entries(folder)) - KNOWN_NAMES):
                await self._unknown_file(folder / name)
            for name in sorted(entries(folder / RUN_FOLDERS)):
                await self._run_folder(folder / RUN_FOLDERS / name)

    def _list(self) -> tuple[list[str], list[str], list[Path]]:
        paths = self._services.paths
        folders = (paths.sandbox_records, paths.container_records)
        odd = [
            f / n
            for f in folders
            for n in sorted(entries(f))
            if "." in n and not n.endswith(".json")
        ]
        return unfinished_sandboxes(self._services), unfinished_containers(self._services), odd

    async def _idle(self) -> bool:
        """Wait until no operation runs, at most `PATIENCE_S`. Return False if an operation still
        runs then."""
        end_s = time.monotonic() + PATIENCE_S
        while len(self._services.running) or self._services.pending:
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(INTERVAL_S)
        return True

    async def _unfinished(
        self,
        kind: str,
        listed: list[str],
        idle: bool,
        still: Callable[[Services], list[str]],
        drop: Callable[[Services, str], Any],
    ) -> None:
        """Remove the folders of those pods or containers in `listed` that still have no record. If
        not `idle`, only report them.

        - `kind`: pod or container.
        - `listed`: the ids without a record before the collector waited.
        - `idle`: there was a moment without operations.
        - `still(services)`: returns the ids without a record now.
        - `drop(services, id)`: removes the folders of one id.
        """
        unknown = set(still(self._services))
        for identifier in sorted(unknown.intersection(listed)):
            size = await asyncio.to_thread(self._size, kind, identifier)
            if not idle:
                self._keep(f"{kind}'s folders", identifier, BUSY, size)
                continue
            why = "no record refers to it: its creation did not finish, or the record is lost"
            remove = partial(drop, self._services, identifier)
            await self._remove(f"{kind}'s folders", identifier, why, size, remove)

    def _size(self, kind: str, identifier: str) -> int:
        paths = self._services.paths
        if kind == "pod":
            folders = paths.sandbox_root(identifier), paths.sandbox_state(identifier)
        else:
            folders = paths.container_root(identifier), paths.container_state(identifier)
        return sum(map(size_of, folders))

    async def _file(self, path: Path, idle: bool) -> None:
        size = size_of(path)
        if path.name.endswith(ENDING):
            if idle:
                await self._remove(
                    "file", str(path), "its writer was killed", size, partial(_remove_tree, path)
                )
            else:
                self._keep("file", str(path), BUSY, size)
        else:
            self._unknown(path, size)

    async def _run_folder(self, path: Path) -> None:
        """Report a folder of `pyrunc-cri run`. It is always kept: its pod may belong to another
        server, and the files in it belong to the user."""
        try:
            owner = (path / RUN_OWNER).read_text()
        except (OSError, UnicodeDecodeError):
            owner = ""
        sandbox = self._services.index.sandboxes.find(owner) if PLAIN_ID.fullmatch(owner) else None
        if sandbox is not None:
            metadata = sandbox.config.metadata
            name = f"{metadata.namespace}/{metadata.name}"
            why = f"logs and volumes of pod {name}, which `pyrunc-cri rm` removes"
        elif owner:
            why = (
                "logs and volumes of a pod of another server, or of one that was removed without "
                "`pyrunc-cri rm`"
            )
        else:
            why = "files of a running `pyrunc-cri run`, or of one that was killed"
        self._keep("pod's files", str(path), why, await asyncio.to_thread(size_of, path))

    async def _unknown_file(self, path: Path) -> None:
        """Report a file in the state or root directory that pyrunc does not know; does nothing for
        a configured socket. Removes the file only if a killed `pyrunc-cri doctor` has left it."""
        config = self._services.config
        if path in (config.socket_path, Path(config.metrics.address.removeprefix("unix://"))):
            return
        size = await asyncio.to_thread(size_of, path)
        if path.name.startswith(DOCTOR) and _age_s(path) > DOCTOR_AGE_S:
            why = "`pyrunc-cri doctor` was killed and left it"
            await self._remove("folder", str(path), why, size, partial(_remove_tree, path))
        else:
            self._unknown(path, size)

    async def network(self, force: bool) -> None:
        """Detach the networks of pods that are gone. The periodic reconciliation does the same.

        `force`: release an address even if its CNI plugins fail; their errors are logged.
        """
        services = self._services
        attached = await services.network.attached()
        live = set(live_networks(services))
        release = services.network.release if force else services.network.detach
        for identifier in attached:
            if identifier not in live:
                await self._remove(
                    "address", identifier, "its pod is gone", 0,
                    partial(release, identifier, None),
                )  # fmt: skip


_WHY = {
    "blob": "no image needs it",
    "layer": "no image needs it",
    "tar": "no image needs it",
    "index": "no image needs it",
    "download": "its pull has ended",
    "trash": "it is in the trash",
}


async def _remove_tree(path: Path) -> None:
    await asyncio.to_thread(remove_path, path)


def _age_s(path: Path) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0
