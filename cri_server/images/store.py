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
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cri_server.images import unpack
from cri_server.images.catalog import Catalog, Content, Name, Policy
from cri_server.images.content import Blobs
from cri_server.images.erofs import build as index_builder
from cri_server.images.erofs import layer_tar
from cri_server.images.erofs.early import GrowingTars
from cri_server.images.erofs.files import LayerFiles
from cri_server.images.erofs.mounts import ImageMount, Mounts
from cri_server.images.erofs.probe import why_not, why_not_shared
from cri_server.images.inflate import Limits
from cri_server.images.layers import Layers, chain_ids
from cri_server.images.manifest import Descriptor, Manifest
from cri_server.images.piped import Interrupted, PipedBlob, Pipes, piped
from cri_server.images.unused import Entry, unused
from cri_server.images.waiting import Abandoned, KeyedLock, Watch, first_error, in_thread
from pyrunc.errors import Error, PeerError, ResourceExhausted, Unsupported
from pyrunc.kernel.full import FULL, reason
from pyrunc.kernel.tree import remove_path
from pyrunc.zygote.client import Zygote

log = logging.getLogger(__name__)

RESERVE_LIMIT_BYTES = 512 << 20
STREAMS_AT_ONCE = 16  # of all pulls: each is a process of a few MiB that mostly waits for its registry
EARLY_LAYERS_LIMIT = 100  # whose descriptors go to a process in one message
Stream = Callable[[Descriptor, Pipes], Awaitable[None]]
_EVERYTHING = "everything"  # a key that is held as digests are
_ERRAND_END_S = 10.0
_UNPACK_ERRAND = "cri_server.images.unpack:errand"
_TAR_ERRAND = "cri_server.images.erofs.layer_tar:errand"
_INDEX_ERRAND = "cri_server.images.erofs.build:errand"


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

    def __init__(
        self,
        root: Path,
        pinned: Iterable[str],
        errands: Zygote | None,
        kind: str = "unpacked",
        keep_blobs: bool = False,
    ) -> None:
        """`kind` and `keep_blobs`: the keys `store` and `keep_blobs` of `[images]`."""
        self.root = root
        self.blobs = Blobs(root)
        self.layers = Layers(root)
        self.files = LayerFiles(root)
        self._mounts = Mounts(self.files)
        self._kind = kind
        self.policy = Policy(keep_blobs=keep_blobs)
        self.catalog = Catalog(root, self.blobs, self.layers, self.files, self.policy, pinned)
        self._errands = errands
        self._held: Counter[str] = Counter()
        self._collecting = threading.Lock()  # held while what nobody needs is deleted
        self._counting = threading.Lock()  # of `_held`, for a moment
        self._changing = asyncio.Lock()
        self.turns = KeyedLock()
        self._cores = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._streams = asyncio.Semaphore(STREAMS_AT_ONCE)
        self._unsynced: set[str] = set()
        self._emptying: asyncio.Task[None] | None = None
        self._has_trash = False

    async def open(self) -> None:
        """Make or read the store; layers that are lost are made again, what no image needs is dropped.

        Raises Unsupported when images are to be mounted and this kernel cannot.
        """
        for name in await in_thread(self._open):
            try:
                await self._make_again(name)
            except Error as error:
                log.warning("image %s is dropped: %s", name.tagged or name.target.digest, error)
        await self.collect()

    def _open(self) -> list[Name]:
        self.blobs.prepare()
        self.layers.prepare()
        self.files.prepare()
        self._choose()
        return self.catalog.load()

    def _choose(self) -> None:
        why_each = why_not_shared() if self._kind == "auto" else ""
        if why_each:
            log.info("images are unpacked: if they were mounted, %s", why_each)
        unpacks = self._kind == "unpacked" or bool(why_each)
        if unpacks and self.files.empty:
            return
        why = self._why_not()
        self.policy.mounts = not why
        self.policy.erofs = self.policy.mounts and not unpacks
        if why and self._kind == "erofs":
            raise Unsupported(
                f'[images] store = "erofs": images cannot be mounted here: {why}; "auto" unpacks them'
            )
        if why:
            level = (
                logging.INFO if self.files.empty else logging.WARNING
            )  # those that are here need room then
            log.log(level, "images are unpacked, since they cannot be mounted here: %s", why)

    def _why_not(self) -> str:
        try:
            return why_not(self.root)
        except ResourceExhausted as error:
            # A full disk must not make a node unpack what is here: kubelet frees it through this server.
            log.warning("it was not tried whether images can be mounted: %s", error)
            return ""

    async def _make_again(self, name: Name) -> None:
        what = "indexing" if self.policy.erofs else "unpacking"
        log.warning("image %s: %s its layers again", name.tagged or name.target.digest, what)
        content = await in_thread(lambda: self.catalog.read(name.target))
        watch = Watch(math.inf, "")
        async with self.loading():
            await self.make_all(content.manifest, content.diff_ids, is_here, watch)
            await self.publish([name], content.diff_ids)

    async def close(self) -> None:
        await self.emptied()
        self._mounts.keep(set())
        self._mounts.release()
        self.files.release()

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

    async def publish(self, names: Sequence[Name], diff_ids: Sequence[str]) -> None:
        """List an image whose blobs and layers are all here: everything it needs reaches the disk first."""
        async with self._changing:
            await in_thread(lambda: self._publish(names, diff_ids), abandon_s=None)
        self._empty_trash_soon()

    def _publish(self, names: Sequence[Name], diff_ids: Sequence[str]) -> None:
        self._sync(diff_ids)
        self.catalog.add(names)
        self._collect()

    def _sync(self, diff_ids: Sequence[str]) -> None:
        chain = chain_ids(diff_ids)
        if pending := self._unsynced & set(chain):
            self.layers.sync([str(self.layers.tree(chain[-1]))])
            self._unsynced -= pending
        self.files.sync(diff_ids, chain)
        self.blobs.sync_folder()

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
            self._empty_trash()
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
        self.files.collect(self.catalog.used_tars() | held, self.catalog.used_indexes() | held)
        self._mounts.keep(self.catalog.used_indexes())

    async def emptied(self) -> None:
        """Wait for deletions that are under way."""
        if self._emptying:
            await asyncio.wait([self._emptying])

    def unused(self) -> list[Entry]:
        """What no image needs, also what pulls hold. Slow: run it in a thread."""
        used = {
            "blob": set(self.catalog.used_blobs()),
            "layer": self.catalog.used_chain_ids(),
            "tar": self.catalog.used_tars(),
            "index": self.catalog.used_indexes(),
        }
        return list(unused(self.root, used))

    def discard(self, entry: Entry) -> bool:
        """Remove one of `unused`; whether it is gone: not when a pull needs it or may need it. Raises OSError."""
        with self._collecting:
            with self._counting:
                held = set(self._held)
            digest = f"sha256:{entry.path.name}"
            used = held | set(self.catalog.used_blobs()) | self.catalog.used_chain_ids()
            used |= self.catalog.used_tars() | self.catalog.used_indexes()
            if _EVERYTHING in held or digest in used or (held and entry.kind == "download"):
                return False
            if entry.kind == "blob":
                self.blobs.remove(digest)
            elif entry.kind == "layer":
                self.layers.drop(digest)
                self.layers.empty_trash()
            elif entry.kind in ("tar", "index"):
                self.files.drop(entry.path)
                self.files.release()
            else:
                remove_path(entry.path)
            return True

    def _empty_trash_soon(self) -> None:
        self._has_trash = True
        if self._emptying is None or self._emptying.done():
            self._emptying = asyncio.get_running_loop().create_task(self._empty_all_trash())

    async def _empty_all_trash(self) -> None:
        while self._has_trash:
            self._has_trash = False
            await in_thread(self._empty_trash)

    def _empty_trash(self) -> None:
        """Give back the memory and the room of what was dropped. Slow: run it in a thread."""
        self.layers.empty_trash()
        self.files.release()
        self._mounts.release()

    def totals(self) -> tuple[int, int]:
        """Bytes and inodes of what the images have on disk."""
        layers, files, blobs = self.layers.totals(), self.files.totals(), self.catalog.used_blobs()
        return layers[0] + files[0] + sum(blobs.values()), layers[1] + files[1] + len(blobs)

    def mount_at_hand(self, content: Content) -> ImageMount | None:
        """The mount of an image that is mounted, if it was asked for before. Does not block."""
        return self._mounts.at_hand(content.chain)

    def mount(self, content: Content) -> ImageMount | None:
        """The image's mount; None for one that is unpacked. Blocking. Raises Error, OSError."""
        return self._mounts.get(content.diff_ids, content.chain) if content.mounted else None

    def drop_tar_pages(self) -> None:
        """See `Mounts.drop_tar_pages`."""
        self._mounts.drop_tar_pages()

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

    async def make_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        fetch: Callable[[Descriptor], Awaitable[None]],
        watch: Watch,
        stream: Stream | None = None,
    ) -> None:
        """Have all layers here, as tars with an index or unpacked with their blobs; `fetch` sees to a blob, `stream` sends one that
        need not be kept into a pipe, or raises Interrupted. In parallel.

        Cancels what is left when one fails. Raises what failed.
        """
        try:
            if diff_ids and self.catalog.is_mounted(manifest.config.digest):
                await self._index_all(manifest, diff_ids, fetch, watch, stream)
            else:
                await self._unpack_all(manifest, diff_ids, fetch, watch)
        except BaseExceptionGroup as problems:
            raise first_error(problems) from None

    def needs_blob(self, image_id: str, layer: Descriptor, diff_id: str) -> bool:
        """Whether the layer's blob must be fetched before `make_all` can have the layer of that image."""
        if self.catalog.is_mounted(image_id) and not self.policy.keep_blobs and self.files.has_tar(diff_id):
            return False
        return self.blobs.size(layer.digest) != layer.size

    async def convert(self, image_id: str, in_use: Callable[[], bool]) -> bool:
        """Bring a listed image to the form that new ones get; False when it is in use. Nothing is fetched.

        Raises NotFound, WrongState (a blob of it is gone), ResourceExhausted, KernelError.
        """
        content = self.catalog.content(image_id)
        mounted = self.policy.erofs
        if in_use():
            return False
        watch = Watch(math.inf, "")
        async with self.holding([*content.blobs, *content.chain, *content.diff_ids]):
            make = self._index_all if mounted else self._unpack_all
            try:
                await make(content.manifest, content.diff_ids, is_here, watch)
            except BaseExceptionGroup as problems:
                raise first_error(problems) from None
            async with self._changing:
                if in_use():
                    return False
                await in_thread(lambda: self._convert(content, mounted), abandon_s=None)
        await self.collect()
        return True

    def _convert(self, content: Content, mounted: bool) -> None:
        self._sync(content.diff_ids)
        self.catalog.convert(content.image_id, mounted)

    # ---- tars and their index

    async def _index_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        fetch: Callable[[Descriptor], Awaitable[None]],
        watch: Watch,
        stream: Stream | None = None,
    ) -> None:
        layers = dict(zip(reversed(diff_ids), reversed(manifest.layers), strict=True))
        chain_id = chain_ids(diff_ids)[-1]
        async with (
            self._index_beside(diff_ids, chain_id, watch, stream) as tars,
            asyncio.TaskGroup() as group,
        ):
            for diff_id in dict.fromkeys(diff_ids):
                group.create_task(self._have_tar(diff_id, layers[diff_id], fetch, watch, stream, tars))
        async with self.turns.of(f"index {chain_id}", watch):
            if not self.files.has_index(chain_id):
                await self._make_index(diff_ids, chain_id, watch)

    @asynccontextmanager
    async def _index_beside(
        self, diff_ids: Sequence[str], chain_id: str, watch: Watch, stream: Stream | None
    ) -> AsyncIterator[GrowingTars | None]:
        """Make the index from tars that are made in the block, as far as they are there. Whatever goes wrong with that, the index is
        not there after the block, and is to be made from the whole tars."""
        if stream is None or self.files.has_index(chain_id) or len(diff_ids) > EARLY_LAYERS_LIMIT:
            yield None
            return
        tars = GrowingTars(diff_ids)

        async def make() -> None:
            async with self.turns.of(f"index {chain_id}", Watch(math.inf, "")):
                if not self.files.has_index(chain_id):
                    await self._make_index(diff_ids, chain_id, watch, tars)

        making = asyncio.create_task(make())
        try:
            yield tars
            if not tars.replaced:
                tars.whole()
                await asyncio.wait([making])
        finally:
            making.cancel()
            tars.whole()
            await asyncio.wait([making])
            if not making.cancelled() and (error := making.exception()):
                log.debug("an index that was begun early: %s", error)
            tars.close()

    async def _have_tar(
        self,
        diff_id: str,
        descriptor: Descriptor,
        fetch: Callable[[Descriptor], Awaitable[None]],
        watch: Watch,
        stream: Stream | None,
        tars: GrowingTars | None,
    ) -> None:
        """Somebody who does the same already is waited for."""
        async with self.turns.of(f"tar {diff_id}", watch):
            here = self.files.has_tar(diff_id)
            if not here and stream and await self._stream_tar(diff_id, descriptor, stream, watch, tars):
                return
            if not here or self.policy.keep_blobs:
                await fetch(descriptor)
            if not here:
                await self._make_tar(diff_id, descriptor, watch)
                self._drop_blob(descriptor.digest)
            if tars:
                tars.begun(diff_id, self.files.open_tar(diff_id))

    def _drop_blob(self, digest: str) -> None:
        """The tar has taken its place, unless somebody else wants it: then it is collected later."""
        with self._counting:
            held = self._held[digest] > 1 or _EVERYTHING in self._held
        if not held and not self.policy.keep_blobs and digest not in self.catalog.used_blobs():
            self.blobs.remove(digest)

    async def _stream_tar(
        self,
        diff_id: str,
        descriptor: Descriptor,
        stream: Stream,
        watch: Watch,
        tars: GrowingTars | None,
    ) -> bool:
        """Make the tar while its blob arrives; False when it must be made from a blob that is kept, or has to be looked into."""
        if self.policy.keep_blobs or self.blobs.size(descriptor.digest) == descriptor.size:
            return False
        try:
            async with self._work_folder() as folder:
                if tars:
                    tars.begun(diff_id, layer_tar.open_new(folder))

                def ticked() -> None:
                    watch.touch()
                    if tars:
                        tars.grown()

                @asynccontextmanager
                async def pipes() -> AsyncIterator[PipedBlob]:
                    with watch.paused():
                        await self._streams.acquire()
                    try:
                        async with piped(lambda fd: self._write_tar(diff_id, fd, folder, ticked)) as blob:
                            yield blob
                    finally:
                        self._streams.release()

                await stream(descriptor, pipes)
                await in_thread(lambda: self.files.commit_tar(folder, diff_id))
        except Interrupted:
            return False
        return True

    async def _make_tar(self, diff_id: str, descriptor: Descriptor, watch: Watch) -> None:
        blob_fd = self.blobs.open_blob(descriptor.digest)
        try:
            async with self._work_folder() as folder:
                async with self._core(watch):
                    await self._write_tar(diff_id, blob_fd, folder, watch.touch)
                await in_thread(lambda: self.files.commit_tar(folder, diff_id))
        finally:
            os.close(blob_fd)

    async def _write_tar(self, diff_id: str, blob_fd: int, folder: str, ticked: Callable[[], None]) -> None:
        limits = self._limits_of_layer()
        arguments = {"folder": folder, "diff_id": diff_id, "limits": asdict(limits)}
        await self._perform(
            _TAR_ERRAND,
            arguments,
            [blob_fd],
            lambda tick: layer_tar.write_tar(blob_fd, folder, diff_id, limits, tick),
            ticked,
        )

    async def _make_index(
        self, diff_ids: Sequence[str], chain_id: str, watch: Watch, growing: GrowingTars | None = None
    ) -> None:
        """Of the tars that are here, or those that are being made."""
        devices = list(dict.fromkeys(diff_ids))
        fds = await growing.fds() if growing else []
        async with self._work_folder() as folder:
            arguments = {
                "folder": folder,
                "tars": [] if growing else [str(self.files.tar(diff_id)) for diff_id in devices],
                "diff_ids": devices,
                "chain": [devices.index(diff_id) for diff_id in diff_ids],
                "uuid": chain_id.removeprefix("sha256:")[: 2 * index_builder.UUID_BYTES],
                "limits": asdict(self._limits_of_layer()),
            }
            # One that waits for tars to grow must not take the turn of those who make them.
            async with nullcontext() if growing else self._core(watch):
                await self._perform(
                    _INDEX_ERRAND,
                    arguments,
                    fds,
                    lambda tick: index_builder.build_in(folder, arguments, tick, fds),
                    watch.touch,
                )
            await in_thread(lambda: self.files.commit_index(folder, chain_id))

    # ---- unpacked layers

    async def _unpack_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        fetch: Callable[[Descriptor], Awaitable[None]],
        watch: Watch,
    ) -> None:
        """Committed bottom first."""
        chain = chain_ids(diff_ids)
        committed = [asyncio.Event() for _ in chain]
        async with asyncio.TaskGroup() as group:
            for number, descriptor in enumerate(manifest.layers):
                below = committed[number - 1] if number else None
                layer = _Wanted(chain[: number + 1], diff_ids[number], descriptor, below, committed[number])
                group.create_task(self._unpack_layer(layer, fetch, watch))

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
        fd = self._open_layer(layer)
        try:
            async with self._work_folder() as folder:
                arguments = {"folder": folder, "diff_id": layer.diff_id, "limits": asdict(limits)}
                async with self._core(watch):
                    await self._perform(
                        _UNPACK_ERRAND,
                        arguments,
                        [fd],
                        lambda tick: unpack.unpack(fd, folder, layer.diff_id, limits, tick),
                        watch.touch,
                    )
                if layer.below is not None:
                    await layer.below.wait()
                self._unsynced.add(layer.chain[-1])
                await in_thread(lambda: self.layers.commit(folder, layer.chain))
        finally:
            os.close(fd)

    def _open_layer(self, layer: _Wanted) -> int:
        """Its blob, or the tar that has taken its place."""
        if self.blobs.size(layer.descriptor.digest) is None and self.files.has_tar(layer.diff_id):
            return self.files.open_tar(layer.diff_id)
        return self.blobs.open_blob(layer.descriptor.digest)

    # ---- work in errands

    @asynccontextmanager
    async def _work_folder(self) -> AsyncIterator[str]:
        """A fresh folder, which is gone at the end, unless it was committed."""
        folder = self.layers.new_folder()
        try:
            yield folder
        finally:
            await in_thread(lambda: self.layers.discard(folder))

    async def _perform(
        self,
        function: str,
        arguments: dict[str, Any],
        fds: list[int],
        here: Callable[[Callable[[], None]], object],
        ticked: Callable[[], None],
    ) -> None:
        """`function` in an errand with a pipe for its progress, or without errands `here` in a thread."""
        if self._errands is None:
            await _in_thread_with_ticks(here, ticked)
        else:
            await _in_errand(self._errands, function, arguments, fds, ticked)

    @asynccontextmanager
    async def _core(self, watch: Watch) -> AsyncIterator[None]:
        """One of the machine's, when it is our turn: waiting for it is not a lack of progress."""
        with watch.paused():
            await self._cores.acquire()
        try:
            yield
        finally:
            self._cores.release()


async def is_here(descriptor: Descriptor) -> None:
    """A `fetch` for `make_all` when all blobs are in the layout already, or have been replaced by tars."""


async def _in_thread_with_ticks(
    work: Callable[[Callable[[], None]], object], ticked: Callable[[], None]
) -> None:
    abandoned = threading.Event()

    def tick() -> None:
        ticked()
        if abandoned.is_set():
            raise Abandoned

    await in_thread(lambda: work(tick), abandoned.set)


async def _in_errand(
    errands: Zygote,
    function: str,
    arguments: dict[str, Any],
    fds: list[int],
    ticked: Callable[[], None],
) -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()  # the errand's end of the pipe is closed, so it is gone and writes no more

    def readable() -> None:
        ticked()
        if not os.read(reading, 4096):
            loop.remove_reader(reading)
            ended.set()

    loop.add_reader(reading, readable)
    try:
        result = await errands.run(function, arguments, [*fds, writing])
    finally:
        os.close(writing)
        try:
            await asyncio.wait_for(ended.wait(), _ERRAND_END_S)
        except TimeoutError:
            log.warning("a process that works on a layer does not end")
        finally:
            loop.remove_reader(reading)
            os.close(reading)
    if result.exit_code:
        said = result.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise PeerError(f"unpacking a layer failed with exit code {result.exit_code}: {said[:300]}")
