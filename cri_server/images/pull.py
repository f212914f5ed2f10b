"""Pulls an image: resolves the reference, chooses the platform, fetches the layers and unpacks or
indexes them in parallel, and lists the image last.

Before this last step nothing of the image is visible. Garbage collection of the store removes the
content of a failed or cancelled pull.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import algorithm_of
from cri_server.images.formats.manifest import Descriptor, ImageConfiguration, ImageIndex, Manifest
from cri_server.images.formats.platforms import Platform
from cri_server.images.formats.reference import Reference
from cri_server.images.layers.incoming import DigestMismatch, IncomingBlob, InMemory
from cri_server.images.layers.ring import Interrupted
from cri_server.images.layers.sharing import Rate
from cri_server.images.layers.streamed import OpenStream
from cri_server.images.model import Auth, Progress
from cri_server.images.registry.client import RegistrySession
from cri_server.images.registry.hosts import hosts_for
from cri_server.images.registry.registry import Registry
from cri_server.images.store.blobs import Ingest
from cri_server.images.store.catalog import Name
from cri_server.images.store.layer_maker import BlobSource
from cri_server.images.store.store import Store
from cri_server.images.store.unpacked_layers import chain_ids
from cri_server.images.waiting import Watch, in_thread
from cri_server.operations.locks import KeyedLock
from cri_server.operations.tasks import gather
from pyrunc.errors import Error, NotFound, ResourceExhausted, WrongState
from pyrunc.kernel.scheduling import set_batch_policy

if TYPE_CHECKING:
    from cri_server.images.signatures.policy import SignaturePolicy

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FETCHES_AT_ONCE = 4
# Kubelet recognizes these errors by the beginning of the message.
PREFIXES = ("RegistryUnavailable: ", "SignatureValidationFailed: ")
REPORT_BYTES = 16 << 10  # received between two progress reports
REPORT_S = 0.05  # between two times that a download's thread wakes the event loop


class Pull:
    """One pull of one reference. Call `run` once."""

    def __init__(
        self,
        store: Store,
        certs_dirs: Sequence[Path],
        reference: Reference,
        auth: Auth | None,
        watch: Watch,
        report: Callable[[Progress], None],
        policy: str = "",
    ) -> None:
        """`watch`: cancels the pull when it makes no progress. `report`: called with the progress.
        `policy`: path of the signature policy; "" for none."""
        self._policy = policy
        self._store = store
        self._certs_dirs = certs_dirs
        self._reference = reference
        self._auth = auth
        self._watch, self._report = watch, report
        self._session = RegistrySession(CONNECTION_READ_TIMEOUT_S, watch.touch)
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._turns = KeyedLock()  # of blobs
        self._rate = Rate()
        self._loop = asyncio.get_running_loop()
        self._fetched = self._total = self._unreported = 0
        self._downloaded: set[str] = set()  # digests of the blobs that this pull has downloaded

    async def run(self, platform: Platform | None = None) -> str:
        """Pull the image for `platform` (None: for this machine), list it under the reference, and
        return its id. Raises Error, whose message names the reference."""
        try:
            with self._store.errors():
                return await self._run(platform)
        except Error as error:
            prefix = next((word for word in PREFIXES if error.message.startswith(word)), "")
            error.message = (
                f"{prefix}pulling {self._reference}: {error.message.removeprefix(prefix)}"
            )
            error.args = (error.message,)
            raise
        finally:
            self._session.close()

    async def _run(self, platform: Platform | None) -> str:
        self._report_stage("resolving")
        rules = await self._thread(self._rules)
        hosts = await self._thread(lambda: hosts_for(self._reference.registry, self._certs_dirs))
        registry = Registry(self._session, self._reference, hosts, self._auth)
        target, data = await self._resolve(registry)
        blobs = {target.digest: data}
        manifest = await self._manifest(registry, target, data, blobs, platform)
        is_index = len(blobs) > 1
        if platform is not None and is_index:
            # The name must not mean the index: if the image for this machine is stored later, the
            # index would lead to that image.
            digest, data = list(blobs.items())[-1]
            media_type = manifests.media_type(data)
            target = Descriptor(media_type, digest, len(data))
        if rules is not None:
            await self._thread(lambda: self._check_signatures(rules, registry, list(blobs)))
        needed = [*blobs, manifest.config.digest, *(d.digest for d in manifest.layers)]
        async with self._store.holding(needed):
            config = await self._config(registry, manifest, blobs)
            if platform is not None and not is_index:
                manifests.check_platform(config, platform)
            async with self._store.holding([*chain_ids(config.diff_ids), *config.diff_ids]):
                # The manifests reach the disk while the layers arrive.
                await gather(self._layers(registry, manifest, config), self._keep(blobs))
                with self._watch.paused():
                    await self._store.publish([self._name(target)], config.diff_ids)
        self._report_stage("done")
        return manifest.config.digest

    async def _resolve(self, registry: Registry) -> tuple[Descriptor, bytes]:
        """Ask the registry which manifest or index the reference means now. Return its descriptor
        and content; the content is downloaded only if it is not stored."""
        name = self._store.catalog.name(str(self._reference))
        stored = {name.target.digest: name.target} if name else {}
        target, data = await self._thread(lambda: registry.resolve(stored))
        data = data or await self._read(target.digest)
        if data is not None:
            return target, data
        target, data = await self._thread(lambda: registry.resolve({}))  # removed meanwhile
        assert data is not None
        return target, data

    async def _read(self, digest: str) -> bytes | None:
        """Read a manifest or index from the store; None when it is absent or damaged."""
        try:
            return await self._thread(lambda: self._store.blobs.read(digest, manifests.LIMIT_BYTES))
        except (NotFound, DigestMismatch):
            return None

    async def _manifest(
        self,
        registry: Registry,
        target: Descriptor,
        data: bytes,
        blobs: dict[str, bytes],
        platform: Platform | None,
    ) -> Manifest:
        """Return the manifest for the platform (None: for this machine). `target`: this manifest,
        or an index that leads to it. `data`: the content of `target`. `blobs`: gets, by digest, the
        content of the nested indexes and, last, of the manifest to which `target` leads."""
        document = await self._parse(data, target)
        depth = 1
        while isinstance(document, ImageIndex):
            depth += 1
            if depth > manifests.DEPTH_LIMIT:
                raise manifests.BadManifest(
                    f"indexes are nested more than {manifests.DEPTH_LIMIT} deep"
                )
            chosen = manifests.choose(document, platform)
            if chosen.size > manifests.LIMIT_BYTES:
                raise manifests.BadManifest(
                    f"index: the chosen manifest has {chosen.size} bytes; the limit is"
                    f" {manifests.LIMIT_BYTES}"
                )
            if chosen.digest in blobs:
                raise manifests.BadManifest("the index contains itself")
            blobs[chosen.digest] = await self._chosen(registry, chosen)
            document = await self._parse(blobs[chosen.digest], chosen)
        return document

    async def _parse(self, data: bytes, descriptor: Descriptor) -> Manifest | ImageIndex:
        # 4 MiB of hostile JSON take half a second.
        return await self._thread(lambda: manifests.parse(data, descriptor.media_type))

    async def _chosen(self, registry: Registry, chosen: Descriptor) -> bytes:
        """Return the content of the manifest or nested index that `chosen` (an entry of an index)
        names. Read it from the store only if this repository has served it before; else download
        it."""
        is_known = chosen.digest in self._store.catalog.documents(self._reference.name)
        data = await self._read(chosen.digest) if is_known else None
        if data is not None:
            return data
        return await self._thread(lambda: registry.manifest(chosen))

    def _rules(self) -> SignaturePolicy | None:
        """Return the signature policy; None if none is configured. Called before any request is
        sent. Raises WrongState if the policy cannot be read, SignatureValidationFailed if it
        rejects all images of the reference's scope."""
        if not self._policy:
            return None
        from cri_server.images.signatures import cosign as signatures
        from cri_server.images.signatures import policy

        rules = policy.read(self._policy)
        signatures.check_scope(rules, self._reference)
        return rules

    def _check_signatures(
        self, rules: SignaturePolicy, registry: Registry, digests: list[str]
    ) -> None:
        """Check the signatures of the manifest and indexes with these `digests`. Called before
        configuration and layers are downloaded. Raises SignatureValidationFailed, PeerError,
        WrongState."""
        from cri_server.images.signatures import cosign as signatures

        try:
            signatures.check(rules, registry, self._reference, digests)
        except ImportError:
            raise WrongState(
                f"signature policy {self._policy} needs the Python package cryptography"
            ) from None

    async def _config(
        self, registry: Registry, manifest: Manifest, blobs: dict[str, bytes]
    ) -> ImageConfiguration:
        """Download and return the image's configuration, and add its content to `blobs`. A stored
        configuration is not used: only the download proves that the registry lets this user have
        the image."""
        content = InMemory(algorithm_of(manifest.config.digest))
        await self._thread(lambda: registry.blob(manifest.config, content, lambda size: None))
        blobs[manifest.config.digest] = content.data
        config = await self._thread(lambda: manifests.parse_config(content.data))
        if warning := manifests.foreign_platform(config):
            log.warning("pulling %s: %s", self._reference, warning)
        manifests.check_layers(manifest, config)
        return config

    async def _keep(self, blobs: dict[str, bytes]) -> None:
        for digest, data in blobs.items():
            await self._thread(partial(self._store.blobs.put, data, algorithm_of(digest)))

    async def _layers(
        self, registry: Registry, manifest: Manifest, config: ImageConfiguration
    ) -> None:
        missing = {
            layer.digest: layer.size
            for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True)
            if self._store.maker.needs_blob(manifest.config.digest, layer, diff_id)
        }
        self._total = sum(missing.values())
        if self._total > self._store.space.free_bytes():
            raise ResourceExhausted(
                f"cannot store {self._total} bytes of layers: {self._store.space.describe_full()}"
            )
        self._report_stage("fetching")
        source = BlobSource(
            self._watch,
            partial(self._fetch, registry),
            partial(self._stream, registry),
            self._reference.registry,
            rate=self._rate,
        )
        await self._store.maker.make_all(manifest, config.diff_ids, source)

    def _name(self, target: Descriptor) -> Name:
        reference = self._reference
        return Name(reference.name, None if reference.digest else reference.tag, target)

    # ---- blobs

    async def _fetch(self, registry: Registry, descriptor: Descriptor, rate: Rate) -> None:
        """Download the blob into the store, at most once in this pull. Download it even if the
        store has it: the caller has decided that this image may not use the stored blob."""
        async with self._turns.hold(descriptor.digest, self._watch.paused()):
            if descriptor.digest in self._downloaded:
                return
            async with self._fetches:
                await self._thread(lambda: self._download(registry, descriptor, rate))
            self._downloaded.add(descriptor.digest)

    def _download(self, registry: Registry, descriptor: Descriptor, rate: Rate) -> None:
        with Ingest(self._store.blobs, algorithm_of(descriptor.digest)) as ingest:
            self._receive(registry, descriptor, ingest, rate)
            ingest.check(descriptor.digest)
            ingest.commit()
        self._watch.touch()

    async def _stream(
        self, registry: Registry, descriptor: Descriptor, opened: OpenStream, rate: Rate
    ) -> None:
        """Send the blob to its decoder while it arrives. Raises Interrupted when the blob must be
        fetched to a file instead."""
        async with self._fetches, opened() as blob:
            try:
                await self._thread(lambda: self._receive(registry, descriptor, blob, rate))
            except Interrupted:
                self._arrived(-blob.size, rate)
                raise
        self._watch.touch()

    def _receive(
        self, registry: Registry, descriptor: Descriptor, blob: IncomingBlob, rate: Rate
    ) -> None:
        """Download a blob into `blob`, a file or a ring. Blocking; runs in its own thread."""
        set_batch_policy()
        arrivals = _ByteCounter(lambda size: self._arrived(size, rate))
        try:
            registry.blob(descriptor, blob, arrivals.add)
        finally:
            arrivals.flush()

    def _arrived(self, size: int, rate: Rate) -> None:
        """Have the event loop count `size` received bytes; a negative `size` means discarded bytes.
        Called in the threads that download."""
        self._loop.call_soon_threadsafe(self._count, size, rate)

    def _count(self, size: int, rate: Rate) -> None:
        rate.arrived(size)
        self._rate.arrived(size)
        self._fetched += size
        self._watch.arrived(max(0, size))
        self._unreported += max(0, size)
        if self._unreported >= REPORT_BYTES:
            self._unreported = 0
            self._report_stage("fetching")

    async def _thread(self, function: Callable[[], Result]) -> Result:
        return await in_thread(function, self._session.abort)

    def _report_stage(self, stage: str) -> None:
        self._report(Progress(str(self._reference), stage, self._fetched, self._total))


class _ByteCounter:
    """Counts the bytes that one thread receives, and passes their number to `notify` at most once
    in REPORT_S. A call for each piece of a few KiB would wake the event loop too often."""

    def __init__(self, notify: Callable[[int], None]) -> None:
        self._notify, self._size, self._last = notify, 0, time.monotonic()

    def add(self, size: int) -> None:
        """Count `size` bytes. A negative `size` subtracts discarded bytes, and is reported to
        `notify` at once."""
        if size < 0:
            self.flush()
        self._size += size
        if size < 0 or time.monotonic() - self._last >= REPORT_S:
            self.flush()

    def flush(self) -> None:
        """Call `notify` with the number of bytes counted since its last call, unless there are
        none."""
        size, self._size, self._last = self._size, 0, time.monotonic()
        if size:
            self._notify(size)


CONNECTION_READ_TIMEOUT_S = 3600.0  # the watch cancels a stalled pull long before
