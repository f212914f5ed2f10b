"""The image store: adds, removes and converts images, and deletes content that no image needs. It
consists of the blobs, layers, tars, mounts and the catalog. Pulls hold leases on content that no
listed image needs yet."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from cri_server.images.erofs.probe import mount_obstacle, sharing_obstacle
from cri_server.images.formats.digests import digest_from_hex
from cri_server.images.formats.manifest import LIMIT_BYTES, parse_config
from cri_server.images.store.blobs import Blobs
from cri_server.images.store.catalog import Catalog, Content, Name, StorePolicy
from cri_server.images.store.layer_files import LayerFiles
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import BlobSource, LayerMaker, LayerStores
from cri_server.images.store.leases import EVERYTHING, Leases
from cri_server.images.store.mount_store import MountStore
from cri_server.images.store.mounts import Mounts
from cri_server.images.store.space import SpaceLimit
from cri_server.images.store.unpacked_layers import Layers, chain_ids
from cri_server.images.store.unused import UnusedEntry, unused
from cri_server.images.waiting import Watch, in_thread
from pyrunc.errors import Error, ResourceExhausted, Unsupported
from pyrunc.kernel.full import FULL, disk_errors
from pyrunc.kernel.tree import remove_path

log = logging.getLogger(__name__)


class Store:
    """Manages the images below `root`. Coroutines run on one event loop."""

    def __init__(
        self,
        root: Path,
        pinned: Iterable[str],
        jobs: LayerJobs,
        kind: str = "unpacked",
        keep_blobs: bool = False,
        mounts: MountStore | None = None,
    ) -> None:
        """`kind`, `keep_blobs`: the values of `store` and `keep_blobs` in `[images]` of the
        configuration. `mounts`: stores the images' mounts in the keeper, so that they survive this
        process."""
        self.root = root
        self.blobs = Blobs(root)
        self.layers = Layers(root)
        self.files = LayerFiles(root)
        self.mounts = Mounts(self.files, mounts or MountStore())
        self._kind = kind
        self.policy = StorePolicy(keep_blobs=keep_blobs)
        self.catalog = Catalog(root, self.blobs, self.layers, self.files, self.policy, pinned)
        self.space = SpaceLimit(root)
        self._leases = Leases()
        self._collecting = threading.Lock()  # held while unused content is deleted
        self._changing = asyncio.Lock()
        self.jobs = jobs
        self.maker = LayerMaker(
            LayerStores(self.blobs, self.layers, self.files),
            self.catalog,
            self.policy,
            self._leases,
            self.space,
            self.jobs,
        )
        self._emptying: asyncio.Task[None] | None = None
        self._has_trash = False

    def errors(self) -> disk_errors:
        """Convert an OSError of a `with` block that accesses the store into ResourceExhausted if
        the disk is full, else into KernelError."""
        return disk_errors("write to the image store", str(self.root))

    async def open(self, in_use: Callable[[str], Sequence[str]]) -> None:
        """Create or read the store, make missing layers of listed images again, and remove content
        that neither an image nor a container needs. `in_use(image_id)`: returns the ids of the
        containers that use an image.

        Raises Unsupported when images are to be mounted and this kernel cannot mount them.
        """
        for name in await in_thread(self._open):
            try:
                await self._rebuild(name)
            except Error as error:
                log.warning("image %s is removed from the store: %s", name, error)
        unlisted = [d for d in await in_thread(self._unlisted) if in_use(d)]
        # These leases are never removed: the containers may run until the server ends.
        self._leases.add(await in_thread(lambda: self._keys_of(unlisted)))
        await self.collect()

    def _unlisted(self) -> set[str]:
        return set(self.blobs.digests()) - set(self.catalog.used_blobs())

    def _keys_of(self, image_ids: Iterable[str]) -> list[str]:
        """Return the keys for leases on the configuration and the layers of these images, which are
        not listed because one of their files is damaged. Leave out an image whose configuration
        cannot be read."""
        keys: list[str] = []
        for image_id in image_ids:
            try:
                diff_ids = parse_config(self.blobs.read(image_id, LIMIT_BYTES)).diff_ids
            except (Error, OSError) as error:
                log.warning("the layers of image %s may be removed: %s", image_id, error)
            else:
                keys += [image_id, *chain_ids(diff_ids), *diff_ids]
        return keys

    def _open(self) -> list[Name]:
        self.blobs.prepare()
        self.layers.prepare()
        self.files.prepare()
        self._choose_form()
        lost = self.catalog.load()
        self.mounts.adopt(self.catalog.mounted())
        return lost

    def _choose_form(self) -> None:
        sharing = sharing_obstacle() if self._kind == "auto" else ""
        if sharing:
            log.info("new images are unpacked and not mounted: %s", sharing)
        unpacks = self._kind == "unpacked" or bool(sharing)
        if unpacks and self.files.empty:
            return
        why = self._mount_obstacle()
        self.policy.mounts = not why
        self.policy.erofs = self.policy.mounts and not unpacks
        if why and self._kind == "erofs":
            raise Unsupported(
                f'[images] store = "erofs": images cannot be mounted here: {why};'
                ' store = "auto" unpacks them'
            )
        if why:
            # Mounted images must be unpacked now, which takes disk space.
            level = logging.INFO if self.files.empty else logging.WARNING
            log.log(level, "images are unpacked, because they cannot be mounted here: %s", why)

    def _mount_obstacle(self) -> str:
        try:
            return mount_obstacle(self.root)
        except ResourceExhausted as error:
            # On a full disk mounted images must not be unpacked: kubelet frees space through this
            # server.
            log.warning("could not test whether images can be mounted: %s", error)
            return ""

    async def _rebuild(self, name: Name) -> None:
        what = "indexing" if self.policy.erofs else "unpacking"
        log.warning("image %s: layers are missing; %s them again", name, what)
        content = await in_thread(lambda: self.catalog.read(name.target))
        async with self.loading():
            await self.maker.make_all(content.manifest, content.diff_ids, _stored_blobs())
            await self.publish([name], content.diff_ids)

    async def close(self, used: set[str]) -> None:
        """Wait for deletions, and close the mounts. `used`: the top chain ids of the images that
        containers use; the mounts of these images stay in the keeper."""
        await self.wait_deleted()
        self.mounts.close(used)
        self.files.release()

    @asynccontextmanager
    async def holding(self, keys: Iterable[str]) -> AsyncIterator[None]:
        """Take leases on `keys` (digests and chain ids), so that garbage collection does not remove
        their content during the `with` block. First waits for the end of a running collection: it
        began without these leases, so it could remove content that the block needs."""
        leased = list(keys)
        await self._lease(leased)
        try:
            yield
        finally:
            self._leases.remove(leased)

    def loading(self) -> AbstractAsyncContextManager[None]:
        """Prevent garbage collection during the `with` block: an archive's blobs are stored before
        it is known which image needs them."""
        return self.holding([EVERYTHING])

    async def _lease(self, keys: list[str]) -> None:
        def add() -> None:
            with self._collecting:
                self._leases.add(keys)

        try:
            await in_thread(add, abandon_s=None)
        except asyncio.CancelledError:
            self._leases.remove(keys)
            raise

    async def publish(self, names: Sequence[Name], diff_ids: Sequence[str]) -> None:
        """List an image under these names. Its blobs and layers must be stored; they are synced
        before the names are written."""
        await self._change(lambda: self._publish(names, diff_ids))

    def _publish(self, names: Sequence[Name], diff_ids: Sequence[str]) -> None:
        # index.json must never name content that a power cut could still lose.
        self._sync(diff_ids)
        self.catalog.add(names)
        self._collect()

    def _sync(self, diff_ids: Sequence[str]) -> None:
        chain = chain_ids(diff_ids)
        self.layers.sync(chain)
        self.files.sync(diff_ids, chain)
        self.blobs.sync_folder()

    async def remove_names(self, choose: Callable[[], Sequence[Name]]) -> None:
        """Remove the names that `choose` returns, and all content that no image needs any more.
        `choose` is called when other changes have ended."""
        async with self._changing:
            names = choose()
            if names:
                await in_thread(lambda: self._remove_names(names), abandon_s=None)
        self._empty_trash_soon()

    def _remove_names(self, names: Sequence[Name]) -> None:
        try:
            self.catalog.remove(names)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.warning(
                "the disk of the image store is full: removing image content before writing"
                " the index"
            )
            self.catalog.remove_in_memory(names)
            self._collect()
            self._empty_trash()
            self.catalog.remove(names)
        self._collect()

    async def collect(self) -> None:
        """Remove content that neither an image nor a running pull needs. A failure is logged; the
        next collection tries again."""
        try:
            await self._change(self._collect)
        except OSError as error:
            log.warning("the image store could not be cleaned: %s", error)

    async def _change(self, change: Callable[[], None]) -> None:
        """Run `change` in a thread after other changes have ended. Then begin, in the background,
        to delete dropped files and close dropped mounts."""
        async with self._changing:
            await in_thread(change, abandon_s=None)
        self._empty_trash_soon()

    def _collect(self) -> None:
        with self._collecting:
            leased = self._leases.current()
            if EVERYTHING not in leased:
                self._drop_all_but(leased)

    def _drop_all_but(self, leased: set[str]) -> None:
        used = self._used()
        for digest in self.blobs.digests():
            if digest not in used["blob"] and digest not in leased:
                self.blobs.remove(digest)
        self.layers.collect(used["layer"] | leased)
        self.files.collect(used["tar"] | leased, used["index"] | leased)
        self.mounts.keep(used["index"])

    async def wait_deleted(self) -> None:
        """Wait until the running deletions have ended."""
        if self._emptying:
            await asyncio.wait([self._emptying])

    def unused(self) -> list[UnusedEntry]:
        """Return the files and folders that no image needs, including those on which pulls hold
        leases. Slow: run it in a thread."""
        return list(unused(self.root, self._used()))

    def _used(self) -> dict[str, set[str]]:
        """Return the digests of the files that images need, by `UnusedEntry.kind`."""
        return {
            "blob": set(self.catalog.used_blobs()),
            "layer": self.catalog.used_chain_ids(),
            "tar": self.catalog.used_tars(),
            "index": self.catalog.used_indexes(),
        }

    def discard(self, entry: UnusedEntry) -> bool:
        """Remove `entry`, a result of `unused`, unless a pull may need it. Return whether the entry
        was removed. Raises OSError."""
        with self._collecting:
            leased = self._leases.current()
            digest = digest_from_hex(entry.path.name)
            used = leased.union(*self._used().values())
            if EVERYTHING in leased or digest in used or (leased and entry.kind == "download"):
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
        """Delete dropped files and close dropped mounts. Slow: run it in a thread."""
        self.layers.empty_trash()
        self.files.release()
        self.mounts.release()

    def totals(self) -> tuple[int, int]:
        """Return the bytes and inodes of the images on disk."""
        layers, files, blobs = self.layers.totals(), self.files.totals(), self.catalog.used_blobs()
        return layers[0] + files[0] + sum(blobs.values()), layers[1] + files[1] + len(blobs)

    async def convert(self, image_id: str, in_use: Callable[[], bool]) -> bool:
        """Convert a listed image to the form that new images get, from stored content, without a
        download. Return False, without converting, if `in_use` returns True.

        Raises NotFound (the image, or a blob of it, is gone), ResourceExhausted, KernelError.
        """
        content = self.catalog.content(image_id)
        if in_use():
            return False
        async with self.holding([*content.blobs, *content.chain, *content.diff_ids]):
            mounted = self.policy.erofs
            await self.maker.make_all(
                content.manifest, content.diff_ids, _stored_blobs(), mounted=mounted
            )
            async with self._changing:
                if in_use():
                    return False
                await in_thread(lambda: self._convert(content, mounted), abandon_s=None)
        await self.collect()
        return True

    def _convert(self, content: Content, mounted: bool) -> None:
        self._sync(content.diff_ids)
        self.catalog.convert(content.image_id, mounted)


def _stored_blobs() -> BlobSource:
    """Return a BlobSource for a listed image. It downloads nothing, because all blobs, or the tars
    that have replaced them, are stored."""
    return BlobSource(Watch(math.inf, ""), is_listed=True)
