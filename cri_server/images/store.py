"""The store that pulls and loads work on: blobs, layers, the catalog, and who holds what while it is not yet listed."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cri_server.images import unpack
from cri_server.images.catalog import Catalog, Name
from cri_server.images.content import Blobs
from cri_server.images.inflate import Limits
from cri_server.images.layers import Layers, chain_ids
from cri_server.images.manifest import Descriptor, Manifest
from cri_server.images.unused import Entry, unused
from cri_server.images.waiting import Abandoned, KeyedLock, Watch, first_error, in_thread
from pyrunc.errors import Error, PeerError, ResourceExhausted
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.tree import remove_path
from pyrunc.zygote.client import Zygote

log = logging.getLogger(__name__)

RESERVE_LIMIT_BYTES = 512 << 20
_EVERYTHING = "everything"  # a key that is held as digests are
_ERRAND_END_S = 10.0
_UNPACK_ERRAND = "cri_server.images.unpack:errand"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A layer to unpack: the last of `chain`, whose content is `diff_id`, from the blob `descriptor`."""

    chain: list[str]
    diff_id: str
    descriptor: Descriptor
    below: asyncio.Event | None
    committed: asyncio.Event


class Store:
    """Everything below `root`. Methods that are coroutines run on one event loop."""

    def __init__(self, root: Path, pinned: Iterable[str], errands: Zygote | None) -> None:
        self.root = root
        self.blobs = Blobs(root)
        self.layers = Layers(root)
        self.catalog = Catalog(root, self.blobs, self.layers, pinned)
        self._errands = errands
        self._held: Counter[str] = Counter()
        self._collecting = threading.Lock()  # held while what nobody needs is deleted
        self._counting = threading.Lock()  # of `_held`, for a moment
        self._changing = asyncio.Lock()
        self.turns = KeyedLock()
        self._cores = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._unsynced: set[str] = set()
        self._emptying: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make or read the store; layers that are lost are unpacked again, what no image needs is dropped."""
        for name in await in_thread(self._open):
            try:
                await self._unpack_again(name)
            except Error as error:
                log.warning("image %s is dropped: %s", name.tagged or name.target.digest, error)
        await self.collect()

    def _open(self) -> list[Name]:
        self.blobs.prepare()
        self.layers.prepare()
        return self.catalog.load()

    async def _unpack_again(self, name: Name) -> None:
        log.warning("image %s: unpacking its layers again", name.tagged or name.target.digest)
        content = await in_thread(lambda: self.catalog.read(name.target))
        watch = Watch(math.inf, "")
        async with self.loading():
            await self.unpack_all(content.manifest, content.config.diff_ids, is_here, watch)
            await self.publish([name], content.chain)

    async def close(self) -> None:
        await self.emptied()

    @asynccontextmanager
    async def holding(self, keys: Iterable[str]) -> AsyncIterator[None]:
        """Keep blobs and layers (digests, chain ids) from being collected. What is here inside stays here: a collection that
        is under way ends first."""
        held = list(keys)
        await self._hold(held)
        try:
            yield
        finally:
            self._release(held)

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Collect nothing: an archive's blobs arrive before it is known what they are."""
        async with self.holding([_EVERYTHING]):
            yield

    async def _hold(self, keys: list[str]) -> None:
        def hold() -> None:
            with self._collecting, self._counting:
                self._held.update(keys)

        try:
            await in_thread(hold, abandon_s=None)
        except asyncio.CancelledError:
            self._release(keys)
            raise

    def _release(self, keys: list[str]) -> None:
        with self._counting:
            self._held.subtract(keys)
            self._held += Counter()  # drops the zeros

    async def publish(self, names: Sequence[Name], chain: Sequence[str]) -> None:
        """List an image whose blobs and layers are all here: everything it needs reaches the disk first."""
        async with self._changing:
            await in_thread(lambda: self._publish(names, chain), abandon_s=None)

    def _publish(self, names: Sequence[Name], chain: Sequence[str]) -> None:
        if pending := self._unsynced & set(chain):
            self.layers.sync([str(self.layers.tree(chain[-1]))])
            self._unsynced -= pending
        self.blobs.sync_folder()
        self.catalog.add(names)
        self._collect()

    async def withdraw(self, choose: Callable[[], Sequence[Name]]) -> None:
        """Take back the names that `choose` answers when it is this caller's turn, and what nobody needs then."""
        async with self._changing:
            names = choose()
            if names:
                await in_thread(lambda: self._withdraw(names), abandon_s=None)
        self._empty_trash_soon()

    def _withdraw(self, names: Sequence[Name]) -> None:
        try:
            self.catalog.remove(names)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.warning("the image store is full: removing first, writing the index then")
            self.catalog.forget(names)
            self._collect()
            self.layers.empty_trash()
            self.catalog.remove(names)
        self._collect()

    async def collect(self) -> None:
        """Drop what neither an image nor a running pull needs. What cannot be dropped now is tried again next time."""
        async with self._changing:
            try:
                await in_thread(self._collect, abandon_s=None)
            except OSError as error:
                log.warning("the image store could not be cleaned: %s", error)
        self._empty_trash_soon()

    def _collect(self) -> None:
        with self._collecting:
            with self._counting:
                held = set(self._held)
            if _EVERYTHING not in held:
                self._drop_all_but(held)

    def _drop_all_but(self, held: set[str]) -> None:
        used = self.catalog.used_blobs()
        for digest in self.blobs.digests():
            if digest not in used and digest not in held:
                self.blobs.remove(digest)
        self.layers.collect(self.catalog.used_chain_ids() | held)

    async def emptied(self) -> None:
        """Wait for deletions that are under way."""
        if self._emptying:
            await asyncio.wait([self._emptying])

    def unused(self) -> list[Entry]:
        """What no image needs, also what pulls hold. Slow: run it in a thread."""
        return list(unused(self.root, set(self.catalog.used_blobs()), self.catalog.used_chain_ids()))

    def discard(self, entry: Entry) -> bool:
        """Remove one of `unused`; whether it is gone: not when a pull needs it or may need it. Raises OSError."""
        with self._collecting:
            with self._counting:
                held = set(self._held)
            digest = f"sha256:{entry.path.name}"
            used = held | set(self.catalog.used_blobs()) | self.catalog.used_chain_ids()
            if _EVERYTHING in held or digest in used or (held and entry.kind == "download"):
                return False
            if entry.kind == "blob":
                self.blobs.remove(digest)
            elif entry.kind == "layer":
                self.layers.drop(digest)
                self.layers.empty_trash()
            else:
                remove_path(entry.path)
            return True

    def _empty_trash_soon(self) -> None:
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.get_running_loop().create_task(in_thread(self.layers.empty_trash))

    def totals(self) -> tuple[int, int]:
        """Bytes and inodes of what the images have on disk."""
        layers, blobs = self.layers.totals(), self.catalog.used_blobs()
        return layers[0] + sum(blobs.values()), layers[1] + len(blobs)

    def free_bytes(self) -> int:
        """What may still be written, with a reserve left for the node to go on."""
        found = os.statvfs(self.root)
        return max(0, found.f_bavail * found.f_frsize - self._reserve_bytes())

    def full(self) -> str:
        """Why no more than `free_bytes` can be written."""
        kept = f"{self._reserve_bytes()} bytes are kept for the node"
        return f"{reason(errno.ENOSPC, str(self.root))} ({kept})"

    def _reserve_bytes(self) -> int:
        found = os.statvfs(self.root)
        return min(RESERVE_LIMIT_BYTES, found.f_blocks * found.f_frsize // 50)

    def limits_of_archive(self) -> Limits:
        """What an archive may unpack to: as much as there is room for. Raises ResourceExhausted when there is none."""
        free = self.free_bytes()
        if not free:
            raise ResourceExhausted(self.full())
        return Limits(free, reason=self.full(), subject="the archive", folder=str(self.root))

    def _limits_of_layer(self) -> Limits:
        """A layer's own, or what there is room for. Raises ResourceExhausted when there is none."""
        limits, room = Limits(folder=str(self.root)), self.limits_of_archive()
        return replace(room, subject=limits.subject) if room.size_bytes < limits.size_bytes else limits

    # ---- layers

    async def unpack_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        fetch: Callable[[Descriptor], Awaitable[None]],
        watch: Watch,
    ) -> None:
        """Have all layers unpacked and their blobs here; `fetch` sees to a blob. In parallel, committed bottom first.

        Cancels what is left when one fails. Raises what failed.
        """
        chain = chain_ids(diff_ids)
        committed = [asyncio.Event() for _ in chain]
        try:
            async with asyncio.TaskGroup() as group:
                for number, descriptor in enumerate(manifest.layers):
                    below = committed[number - 1] if number else None
                    layer = _Wanted(
                        chain[: number + 1], diff_ids[number], descriptor, below, committed[number]
                    )
                    group.create_task(self._unpack_layer(layer, fetch, watch))
        except BaseExceptionGroup as problems:
            raise first_error(problems) from None

    async def _unpack_layer(
        self, layer: _Wanted, fetch: Callable[[Descriptor], Awaitable[None]], watch: Watch
    ) -> None:
        """Somebody who does the same already is waited for."""
        async with self.turns.of(f"layer {layer.chain[-1]}", watch):
            await fetch(layer.descriptor)
            if self.layers.get(layer.chain[-1]) is None:
                await self._unpack(layer, watch)
        layer.committed.set()

    async def _unpack(self, layer: _Wanted, watch: Watch) -> None:
        limits = self._limits_of_layer()
        folder = self.layers.new_folder()
        try:
            with watch.paused():
                await self._cores.acquire()
            try:
                await self._run(folder, layer, limits, watch)
            finally:
                self._cores.release()
            if layer.below is not None:
                await layer.below.wait()
            self._unsynced.add(layer.chain[-1])
            await in_thread(lambda: self.layers.commit(folder, layer.chain))
        finally:
            await in_thread(lambda: self.layers.discard(folder))

    async def _run(self, folder: str, layer: _Wanted, limits: Limits, watch: Watch) -> None:
        blob_fd = self.blobs.open_blob(layer.descriptor.digest)
        try:
            if self._errands is None:
                await _unpack_in_thread(blob_fd, folder, layer.diff_id, limits, watch)
            else:
                await _unpack_in_errand(self._errands, blob_fd, folder, layer.diff_id, limits, watch)
        finally:
            os.close(blob_fd)


async def is_here(descriptor: Descriptor) -> None:
    """A `fetch` for `unpack_all` when all blobs are in the layout already."""


async def _unpack_in_thread(blob_fd: int, folder: str, diff_id: str, limits: Limits, watch: Watch) -> None:
    abandoned = threading.Event()

    def tick() -> None:
        watch.touch()
        if abandoned.is_set():
            raise Abandoned

    await in_thread(lambda: unpack.unpack(blob_fd, folder, diff_id, limits, tick), abandoned.set)


async def _unpack_in_errand(
    errands: Zygote, blob_fd: int, folder: str, diff_id: str, limits: Limits, watch: Watch
) -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()  # the errand's end of the pipe is closed, so it is gone and writes no more

    def ticked() -> None:
        watch.touch()
        if not os.read(reading, 4096):
            loop.remove_reader(reading)
            ended.set()

    loop.add_reader(reading, ticked)
    arguments = {"folder": folder, "diff_id": diff_id, "limits": asdict(limits)}
    try:
        result = await errands.run(_UNPACK_ERRAND, arguments, [blob_fd, writing])
    finally:
        os.close(writing)
        try:
            await asyncio.wait_for(ended.wait(), _ERRAND_END_S)
        except TimeoutError:
            log.warning("a process that unpacks a layer does not end")
        finally:
            loop.remove_reader(reading)
            os.close(reading)
    if result.exit_code:
        said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise PeerError(f"unpacking a layer failed with exit code {result.exit_code}: {said[:300]}")
