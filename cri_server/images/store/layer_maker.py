"""Converts the blobs of an image's layers, in parallel: decompresses them to tars and builds one
EROFS index of the tars, or unpacks them into folders. If another pull from the same registry makes
one of the layers, this pull may wait for that layer instead of making it again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cri_server.images.erofs import build as index_builder
from cri_server.images.erofs import layer_tar
from cri_server.images.erofs.format import uuid_of
from cri_server.images.erofs.partial_tars import PartialTars
from cri_server.images.formats.digests import algorithm_of
from cri_server.images.formats.manifest import Descriptor, Manifest
from cri_server.images.layers.inflate import LayerWork
from cri_server.images.layers.ring import Interrupted, Receiver
from cri_server.images.layers.sharing import Rate, SharedWork, StreamTurn
from cri_server.images.layers.streamed import OpenStream, StreamedBlob, streamed
from cri_server.images.store.blobs import Blobs
from cri_server.images.store.catalog import Catalog, StorePolicy
from cri_server.images.store.layer_files import LayerFiles
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.leases import Leases
from cri_server.images.store.space import SpaceLimit
from cri_server.images.store.unpacked_layers import Layers, chain_ids
from cri_server.images.store.verified import VerifiedLayers
from cri_server.images.waiting import Watch, first_error, in_thread
from cri_server.operations.locks import KeyedLock
from pyrunc.kernel.fd import closing_fd

log = logging.getLogger(__name__)

PARTIAL_LAYERS_LIMIT = 100  # their descriptors are passed in one message
JOB_MODULES = (
    "cri_server.images.layers.decode",
    "cri_server.images.erofs.build",
    "cri_server.images.erofs.layer_tar",
    "cri_server.images.layers.unpack",
)
UNPACK_JOB = "cri_server.images.layers.unpack:job"
TAR_JOB = "cri_server.images.erofs.layer_tar:job"
INDEX_JOB = "cri_server.images.erofs.build:job"


@dataclass(frozen=True, slots=True)
class LayerStores:
    """The stores of blobs, of unpacked layers, and of tars with EROFS indexes."""

    blobs: Blobs
    layers: Layers
    files: LayerFiles


async def _already_stored(descriptor: Descriptor, rate: Rate) -> None:
    pass


@dataclass(frozen=True, slots=True)
class BlobSource:
    """Where the blobs of an image come from.

    - `watch`: cancels the pull or load when it makes no progress.
    - `fetch`: downloads a blob into the OCI layout. The default does nothing, for an image whose
      layers are all stored as blobs or tars.
    - `stream`: sends a blob to its decoder without storing it, or raises Interrupted. None: blobs
      cannot be streamed.
    - `origin`: the registry, "" for this node.
    - `is_listed`: the image is or was listed, so its layers have been verified.
    - `rate`: measures the download of the whole image. `fetch` and `stream` are called with another
      Rate, of one layer.
    """

    watch: Watch
    fetch: Callable[[Descriptor, Rate], Awaitable[None]] = _already_stored
    stream: Callable[[Descriptor, OpenStream, Rate], Awaitable[None]] | None = None
    origin: str = ""
    is_listed: bool = False
    rate: Rate = field(default_factory=Rate)  # of the whole image


@dataclass(frozen=True, slots=True)
class _LayerToUnpack:
    """A layer to unpack from the blob `descriptor`.

    - `chain`: the chain ids of the layers below and of this layer, bottom first.
    - `committed`: is set when this layer is in the store.
    - `below`: the event `committed` of the next lower layer; None for the bottom layer.
    - `times`: how often the image contains the diff id. Each occurrence has a different chain id,
      so each is unpacked into a separate folder.
    """

    chain: list[str]
    diff_id: str
    times: int
    descriptor: Descriptor
    below: asyncio.Event | None
    committed: asyncio.Event = field(default_factory=asyncio.Event)


class LayerMaker:
    """Decompresses or unpacks layers into one image store. Coroutines run on one event loop."""

    def __init__(
        self,
        folders: LayerStores,
        catalog: Catalog,
        policy: StorePolicy,
        leases: Leases,
        space: SpaceLimit,
        jobs: LayerJobs,
    ) -> None:
        self._blobs, self._layers, self._files = folders.blobs, folders.layers, folders.files
        self._catalog = catalog
        self._policy = policy
        self._leases = leases
        self._space = space
        self._jobs = jobs
        self._verified = VerifiedLayers(catalog)
        self._work = SharedWork()
        self._commits = KeyedLock()  # held while a finished file is renamed

    async def make_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        source: BlobSource,
        mounted: bool | None = None,
    ) -> None:
        """Make all layers of an image in parallel: tars with an EROFS index if `mounted`, else
        unpacked layers with their blobs. If `mounted` is None, a listed image keeps its form, and
        any other image gets the configured form.

        When one layer fails, the others are cancelled. Raises the error of the failed layer: an
        error of `source`, NotFound (a stored blob is gone), ResourceExhausted, KernelError.
        """
        if mounted is None:
            mounted = self._catalog.is_mounted(manifest.config.digest)
        make = self._index_all if mounted and diff_ids else self._unpack_all
        try:
            await make(manifest, diff_ids, source)
        except BaseExceptionGroup as problems:
            raise first_error(problems) from None

    def needs_blob(self, image_id: str, layer: Descriptor, diff_id: str) -> bool:
        """Return whether `make_all` must fetch the layer's blob for this image."""
        if not self._verified.has(layer.digest, diff_id):
            return True
        if (
            self._catalog.is_mounted(image_id)
            and not self._policy.keep_blobs
            and self._files.has_tar(diff_id)
        ):
            return False
        return self._blobs.size(layer.digest) != layer.size

    def _is_shared(self, layer: Descriptor, diff_id: str, source: BlobSource) -> bool:
        """Return whether the image may use the layer if it is stored already. True if the image is
        or was listed, or if the blob was decoded to this diff id before."""
        return source.is_listed or self._verified.has(layer.digest, diff_id)

    # ---- tars and their index

    async def _index_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        source: BlobSource,
    ) -> None:
        chain_id = chain_ids(diff_ids)[-1]
        layers = {
            (d, layer.digest): layer for d, layer in zip(diff_ids, manifest.layers, strict=True)
        }
        async with (
            self._index_meanwhile(diff_ids, chain_id, source) as tars,
            asyncio.TaskGroup() as group,
        ):
            for (diff_id, _), layer in layers.items():
                group.create_task(self._ensure_tar(diff_id, layer, source, tars))
        rate = Rate()
        async with self._work.turn(f"index {chain_id} {source.origin}", rate, source.watch):
            if not self._files.has_index(chain_id):
                with rate.node_work():
                    await self._make_index(diff_ids, chain_id, source.watch)

    @asynccontextmanager
    async def _index_meanwhile(
        self, diff_ids: Sequence[str], chain_id: str, source: BlobSource
    ) -> AsyncIterator[PartialTars | None]:
        """Build the image's EROFS index while the `with` block writes the tars. The `with` block
        adds each tar to the provided PartialTars. Provides None if the index cannot be built
        meanwhile.

        If the index is missing afterwards, the caller builds it from the complete tars.
        """
        if (
            source.stream is None
            or self._files.has_index(chain_id)
            or len(diff_ids) > PARTIAL_LAYERS_LIMIT
        ):
            yield None
            return
        tars = PartialTars(diff_ids)

        async def make() -> None:
            key = f"index {chain_id} {source.origin}"
            async with self._work.turn(key, source.rate, Watch(math.inf, "")):
                if not self._files.has_index(chain_id):
                    await self._make_index(diff_ids, chain_id, source.watch, tars)

        making = asyncio.create_task(make())
        try:
            yield tars
            if not tars.replaced:
                tars.finish()
                await asyncio.wait([making])
        finally:
            making.cancel()
            tars.finish()
            await asyncio.wait([making])
            if not making.cancelled() and (error := making.exception()):
                log.debug(
                    "layer %s: its index was not built while its tars were written: %s",
                    chain_id,
                    error,
                )
            tars.close()

    async def _ensure_tar(
        self,
        diff_id: str,
        descriptor: Descriptor,
        source: BlobSource,
        tars: PartialTars | None,
    ) -> None:
        """Make the layer's tar, unless a stored tar is verified to come from this blob. If another
        pull commits the tar first, that tar is used, and the one made here is deleted."""
        rate = Rate()
        async with self._work.turn(f"tar {diff_id} {source.origin}", rate, source.watch):
            is_shared = self._is_shared(descriptor, diff_id, source)
            is_stored = is_shared and self._files.has_tar(diff_id)
            if not is_stored and await self._stream_tar(diff_id, descriptor, source, tars, rate):
                return
            if not is_stored or self._policy.keep_blobs:
                await self._ensure_blob(descriptor, is_shared, source, rate)
            if not is_stored:
                with rate.node_work(), source.rate.node_work():
                    await self._make_tar(diff_id, descriptor, source.watch)
                self._drop_blob(descriptor.digest)
            if tars:
                tars.add(diff_id, self._files.open_tar(diff_id))

    async def _ensure_blob(
        self, descriptor: Descriptor, is_shared: bool, source: BlobSource, rate: Rate
    ) -> None:
        if not is_shared or self._blobs.size(descriptor.digest) != descriptor.size:
            await source.fetch(descriptor, rate)

    def _drop_blob(self, digest: str) -> None:
        """Remove the blob of a layer whose tar is now stored. Keep the blob if the policy says so,
        if an image needs it, or if another pull has a lease on it; later garbage collection may
        then remove it."""
        if (
            not self._leases.by_others(digest)
            and not self._policy.keep_blobs
            and digest not in self._catalog.used_blobs()
        ):
            self._blobs.remove(digest)

    async def _stream_tar(
        self,
        diff_id: str,
        descriptor: Descriptor,
        source: BlobSource,
        tars: PartialTars | None,
        rate: Rate,
    ) -> bool:
        """Decompress the layer's blob into a tar while it is downloaded. Return False if this was
        interrupted, or is not possible or not wanted: the caller must then decompress the blob from
        a file."""
        stream, watch = source.stream, source.watch
        is_stored = self._blobs.size(descriptor.digest) == descriptor.size
        is_usable = is_stored and self._is_shared(descriptor, diff_id, source)
        if stream is None or self._policy.keep_blobs or is_usable:
            return False
        try:
            async with self._layers.folder() as folder:
                if tars:
                    tars.add(diff_id, layer_tar.open_new(folder))

                arriving: list[StreamedBlob] = []

                def on_progress() -> None:
                    # While the blob arrives, received bytes count as progress, not decoded ones:
                    # 130 bytes of zstd may be 4 MiB of zeros.
                    if all(blob.is_closed for blob in arriving):
                        watch.touch()
                    if tars:
                        tars.notify()

                @asynccontextmanager
                async def opened() -> AsyncIterator[StreamedBlob]:
                    turn = StreamTurn(source.origin, rate)
                    async with (
                        self._jobs.streams.hold(turn, watch),
                        streamed(
                            lambda end: self._write_tar(diff_id, end, folder, on_progress),
                            algorithm_of(descriptor.digest),
                        ) as blob,
                    ):
                        turn.give_way = blob.interrupt
                        arriving.append(blob)
                        yield blob

                await stream(descriptor, opened, rate)
                await self._commit_tar(folder, descriptor, diff_id, watch)
        except Interrupted:
            return False
        return True

    async def _make_tar(self, diff_id: str, descriptor: Descriptor, watch: Watch) -> None:
        with closing_fd(self._blobs.open_blob(descriptor.digest)) as blob_fd:
            async with self._layers.folder() as folder:
                async with self._jobs.cores.hold(watch):
                    await self._write_tar(diff_id, blob_fd, folder, watch.touch)
                await self._commit_tar(folder, descriptor, diff_id, watch)

    async def _commit_tar(self, folder: str, layer: Descriptor, diff_id: str, watch: Watch) -> None:
        """Move the tar in `folder`, decompressed from the blob `layer`, into the store. A tar that
        is stored already is not replaced, because it may be mounted and in the page cache. Add the
        pair of blob and diff id to the verified layers."""
        async with self._commits.hold(f"tar {diff_id}", watch.paused()):
            if not self._files.has_tar(diff_id):
                await self._commit(lambda: self._files.commit_tar(folder, diff_id), watch)
        self._verified.add(layer.digest, diff_id)

    async def _write_tar(
        self, diff_id: str, blob: int | Receiver, folder: str, on_progress: Callable[[], None]
    ) -> None:
        limits = self._space.limits_of_layer()
        await self._jobs.run_decoded(
            TAR_JOB,
            LayerWork(folder, limits, diff_id),
            blob,
            on_progress,
        )

    async def _make_index(
        self,
        diff_ids: Sequence[str],
        chain_id: str,
        watch: Watch,
        partial: PartialTars | None = None,
    ) -> None:
        """Build the index (EROFS metadata) of the image `chain_id` from its layers' tars, and move
        it into the store. `partial`: the tars, if they are still being written; None: read the
        stored tars."""
        # A layer that occurs several times in the image is one device.
        devices = list(dict.fromkeys(diff_ids))
        fds = await partial.fds() if partial else []
        async with self._layers.folder() as folder:
            work = index_builder.IndexWork(
                folder=folder,
                tars=[] if partial else [str(self._files.tar(diff_id)) for diff_id in devices],
                diff_ids=devices,
                chain=[devices.index(diff_id) for diff_id in diff_ids],
                uuid=uuid_of(chain_id).hex(),
                limits=self._space.limits_of_layer(),
            )

            def on_progress() -> None:
                # otherwise received bytes count as progress
                if partial is None or partial.is_finished:
                    watch.touch()

            async with self._jobs.indexes.borrow() if partial else self._jobs.index(watch):
                await self._jobs.run(
                    INDEX_JOB,
                    work,
                    fds,
                    on_progress,
                )
            async with self._commits.hold(f"index {chain_id}", watch.paused()):
                if not self._files.has_index(chain_id):  # an existing one may be mounted
                    await self._commit(lambda: self._files.commit_index(folder, chain_id), watch)

    async def _commit(self, take: Callable[[], None], watch: Watch) -> None:
        """Run `take` in a thread; it moves a finished file or folder into the store. Return only
        after `take` has ended, even when the caller is cancelled, because a cancelled caller
        deletes the folder from which `take` moves."""
        with watch.paused():
            await in_thread(take, abandon_s=None)

    # ---- unpacked layers

    async def _unpack_all(
        self,
        manifest: Manifest,
        diff_ids: Sequence[str],
        source: BlobSource,
    ) -> None:
        """Unpack the layers in parallel, and commit them bottom first."""
        chain = chain_ids(diff_ids)
        times = Counter(diff_ids)
        below = None
        async with asyncio.TaskGroup() as group:
            for number, descriptor in enumerate(manifest.layers):
                diff_id = diff_ids[number]
                layer = _LayerToUnpack(
                    chain[: number + 1], diff_id, times[diff_id], descriptor, below
                )
                group.create_task(self._unpack_layer(layer, source))
                below = layer.committed

    async def _unpack_layer(self, layer: _LayerToUnpack, source: BlobSource) -> None:
        rate = Rate()
        async with self._work.turn(f"layer {layer.chain[-1]} {source.origin}", rate, source.watch):
            is_shared = self._is_shared(layer.descriptor, layer.diff_id, source)
            await self._ensure_blob(layer.descriptor, is_shared, source, rate)
            if not is_shared or self._layers.get(layer.chain[-1]) is None:
                await self._unpack(layer, source.watch, rate)
        layer.committed.set()

    async def _unpack(self, layer: _LayerToUnpack, watch: Watch, rate: Rate) -> None:
        limits = self._space.limits_of_layer().shared(layer.times)
        with closing_fd(self._open_layer(layer)) as fd:
            async with self._layers.folder() as folder:
                with rate.node_work():
                    async with self._jobs.cores.hold(watch):
                        await self._jobs.run_decoded(
                            UNPACK_JOB,
                            LayerWork(folder, limits, layer.diff_id),
                            fd,
                            watch.touch,
                        )
                # Directories that the layer does not describe take their attributes from the layers
                # below.
                if layer.below is not None:
                    await layer.below.wait()
                async with self._commits.hold(f"layer {layer.chain[-1]}", watch.paused()):
                    if self._layers.get(layer.chain[-1]) is None:  # an existing one may be in use
                        await self._commit(lambda: self._layers.commit(folder, layer.chain), watch)
            self._verified.add(layer.descriptor.digest, layer.diff_id)

    def _open_layer(self, layer: _LayerToUnpack) -> int:
        """Open the layer's blob for reading, or the tar that has replaced the blob. The caller
        closes the descriptor."""
        if self._blobs.size(layer.descriptor.digest) is None and self._files.has_tar(layer.diff_id):
            return self._files.open_tar(layer.diff_id)
        return self._blobs.open_blob(layer.descriptor.digest)
