"""The image service behind the CRI's ImageService and `pyrunc-cri image`. Coroutines run on one
event loop."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cri_server.images.archives import load as archives
from cri_server.images.formats.digests import digest_of, hex_of
from cri_server.images.formats.manifest import LIMIT_BYTES, ImageConfig
from cri_server.images.formats.platforms import Platform
from cri_server.images.formats.reference import Reference
from cri_server.images.layers.inflate import UnpackLimits
from cri_server.images.model import Auth, Image, Progress, StoreUsage
from cri_server.images.store.catalog import Content, Name, id_matches
from cri_server.images.store.image_paths import ImagePaths
from cri_server.images.store.layer_blobs import PlainLayers
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import BlobSource
from cri_server.images.store.mount_store import MountStore
from cri_server.images.store.mounts import ImageMount
from cri_server.images.store.store import Store
from cri_server.images.store.unused import UnusedEntry
from cri_server.images.waiting import Watch, in_thread
from pyrunc.errors import InvalidArgument, NotFound, WrongState

if TYPE_CHECKING:
    from cri_server.images.pull import Pull
    from cri_server.images.registry.hosts import RegistryHost
    from cri_server.images.registry.registry import Registry

__all__ = ["Auth", "Image", "ImageConfig", "ImageService", "Progress", "Rootfs"]

log = logging.getLogger(__name__)

_NAMES_SHOWN = 5
DROP_TAR_PAGES_S = 30.0  # interval; pages are dropped at the second call after the mount
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Rootfs:
    """An image's configuration and files, for a container. `lower_dirs`: the paths of the unpacked
    layers, top first; for an image that is mounted as EROFS, only the path of `mount`. The mount
    stays open as long as this object exists."""

    image_id: str
    lower_dirs: list[Path]
    config: ImageConfig
    mount: ImageMount | None = None


class ImageService:
    """Pulls, lists, removes and mounts the images below `root`: an OCI image layout and the files
    made from its layers.

    - `certs_dirs`: folders that contain HOST/hosts.toml. A registry's settings come from the first
      of them that has a folder for the registry.
    - `pinned`: references whose images `status` and `list` mark as pinned.
    - `jobs`: starts the jobs that work on layers.
    - `in_use(image_id)`: returns the ids of the containers that use an image; such an image is
      neither removed nor converted. The server sets it.
    """

    def __init__(
        self,
        root: Path,
        certs_dirs: Sequence[Path] = (),
        pinned: Sequence[str] = (),
        *,
        jobs: LayerJobs,
        no_progress_timeout_s: float = 300.0,
        in_use: Callable[[str], Sequence[str]] = lambda image_id: (),
        store: str = "unpacked",
        keep_blobs: bool = False,
        mounts: MountStore | None = None,
    ) -> None:
        """`store`, `keep_blobs`: the keys of `[images]` in the configuration. `mounts`: stores the
        images' mounts in the keeper, so that they survive this process."""
        self.in_use = in_use
        self._store = Store(root, pinned, jobs, store, keep_blobs, mounts)
        self._certs_dirs = tuple(certs_dirs)
        self._no_progress_timeout_s = no_progress_timeout_s
        self._pulls: dict[str, _RunningPull] = {}
        self.policy = ""  # path of the signature policy, as in containers-policy.json(5)
        self._dropping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[str]] = set()  # running pulls, also cancelled ones
        # Ids of images, by the container that is being created from them.
        self._leases: dict[str, set[str]] = {}

    def reconfigure(
        self, certs_dirs: Sequence[Path], pinned: Sequence[str], no_progress_timeout_s: float
    ) -> None:
        """Change the settings for later calls. Raises InvalidArgument for a malformed reference in
        `pinned`."""
        self._store.catalog.pin(pinned)
        self._certs_dirs, self._no_progress_timeout_s = tuple(certs_dirs), no_progress_timeout_s

    async def start(self) -> None:
        """Create or read the store, and remove content that neither an image nor a container needs.
        Call once, before any other method.

        Raises ResourceExhausted, KernelError, Unsupported (images are to be mounted, and this
        kernel cannot mount them).
        """
        with self._store.errors():
            await self._store.open(self.in_use)
        self._dropping = asyncio.create_task(self._drop_tar_pages())

    async def _drop_tar_pages(self) -> None:
        while True:
            await asyncio.sleep(DROP_TAR_PAGES_S)
            try:
                await in_thread(self._store.mounts.drop_tar_pages)
            except OSError as error:
                log.warning("could not drop the page cache of images' tars: %s", error)

    async def close(self) -> None:
        """Cancel running pulls, wait for them, and close the store."""
        running: set[asyncio.Task[Any]] = {
            *self._tasks,
            *([self._dropping] if self._dropping else []),
        }
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        mounted = self._store.catalog.mounted()
        used = {content.chain[-1] for content in mounted if self.in_use(content.image_id)}
        await self._store.close(used)

    async def store_mounts(self) -> None:
        """Store the open mounts of images in the keeper. Call this for each new keeper, because it
        has no mounts yet."""
        await in_thread(self._store.mounts.store_all)

    async def pull(
        self,
        reference: str,
        auth: Auth | None = None,
        progress: Callable[[Progress], None] | None = None,
        platform: Platform | None = None,
    ) -> str:
        """Pull an image for `platform` (None: for this machine); return its id. Concurrent calls
        with the same reference, secret and platform share one pull; it is cancelled when all these
        calls are cancelled.

        Raises InvalidArgument (reference), NotFound, PeerError (the message begins with
        `RegistryUnavailable` when no host of the registry could be used), DeadlineExceeded (no
        progress), ResourceExhausted, Unsupported.
        """
        parsed = Reference.parse(reference)
        key = f"{_key(parsed, auth)} {platform or ''}"
        running = self._pulls.get(key)
        # kubelet repeats a cancelled call at once. If the new call joined the pull that is ending,
        # it would be cancelled, too.
        if running is None or running.is_ending:
            running = self._pulls[key] = _RunningPull()
            running.task = asyncio.create_task(
                self._pull(parsed, auth, running, platform), name=f"pull {parsed}"
            )
            self._tasks.add(running.task)
            running.task.add_done_callback(lambda task: self._ended(key, task))
        return await running.join(progress)

    def _ended(self, key: str, task: asyncio.Task[str]) -> None:
        self._tasks.discard(task)
        if key in self._pulls and self._pulls[key].task is task:
            del self._pulls[key]

    async def _pull(
        self,
        reference: Reference,
        auth: Auth | None,
        running: _RunningPull,
        platform: Platform | None,
    ) -> str:
        watch = Watch(self._no_progress_timeout_s, f"pulling {reference}")
        puller = await in_thread(_puller)
        pull = puller(
            self._store, self._certs_dirs, reference, auth, watch, running.report, self.policy
        )
        try:
            image_id = await watch.guard(asyncio.create_task(pull.run(platform)))
        except BaseException:
            await self._store.collect()
            raise
        if self._store.policy.erofs:
            await self._store.collect()  # drops blobs that tars have replaced
        return image_id

    async def status(self, reference: str) -> Image | None:
        """Return the image that `reference` names: by id (with or without `sha256:`, or by a unique
        prefix), by tag or by digest. None if it is absent."""
        return self._store.catalog.find(reference)

    async def list(self, reference: str | None = None) -> builtins.list[Image]:
        """Return all images, or only the image that `reference` names; an empty list if it is
        absent."""
        if not reference:
            return self._store.catalog.images()
        image = self._store.catalog.find(reference)
        return [image] if image else []

    async def remove(self, reference: str) -> None:
        """Remove names of an image. An image without any name left is removed from the store. Does
        nothing for an absent image.

        - If `reference` is a tag, remove this one name.
        - If it is a digest, remove all names with this digest in the same repository.
        - If it is an image id, remove all names of the image.

        Raises WrongState if no name would remain while a container uses the image, even one that is
        still being created.
        """
        with self._store.errors():
            await self._store.remove_names(lambda: self._names_to_remove(reference))

    def _names_to_remove(self, reference: str) -> builtins.list[Name]:
        catalog = self._store.catalog
        image = catalog.find(reference)
        if image is None:
            return []
        names = catalog.names_of(image.id)
        chosen = catalog.name(reference)
        if chosen is not None and reference not in (image.id, hex_of(image.id)):
            same = [
                n for n in names if n.repository == chosen.repository and n.target == chosen.target
            ]
            names_chosen = same if "@" in reference else [chosen]
            if set(names_chosen) != set(names):
                return names_chosen
        users = builtins.list(self.in_use(image.id))
        if users:
            more = f" and {len(users) - _NAMES_SHOWN} more" if len(users) > _NAMES_SHOWN else ""
            raise WrongState(
                f"image {reference} is in use by container {', '.join(users[:_NAMES_SHOWN])}{more}"
            )
        if self._is_leased(image.id):
            raise WrongState(f"image {reference} is in use by a container that is being created")
        return names

    def _is_leased(self, image_id: str) -> bool:
        """Return whether a container that is being created uses the image. (`in_use` does not know
        the container yet.)"""
        return any(image_id in leased for leased in self._leases.values())

    async def rootfs(self, image_id: str, container_id: str = "") -> Rootfs:
        """Return the image's configuration and its unpacked layers or mount. Raises NotFound,
        KernelError.

        `container_id`: a container that is being created. Until `release(container_id)` the image
        then keeps its form (mounted or unpacked), and its last name cannot be removed.
        """
        content = self._store.catalog.content(image_id)
        if not content.mounted:
            layers = self._store.layers.lower_dirs(content.chain)
            rootfs = Rootfs(image_id, layers, content.config.image)
        else:
            mounts, chain = self._store.mounts, content.chain
            mount = mounts.cached(chain)
            if mount is None:
                with self._store.errors():
                    mount = await in_thread(lambda: mounts.get(content.diff_ids, chain))
            # While this call waited for the mount, `gc` may have converted the image, because no
            # container uses it yet.
            if self._store.catalog.content(image_id) is not content:  # converted meanwhile
                return await self.rootfs(image_id, container_id)
            rootfs = Rootfs(image_id, [mount.path], content.config.image, mount)
        if container_id:
            self._leases.setdefault(container_id, set()).add(image_id)
        return rootfs

    def release(self, container_id: str) -> None:
        """Release the images of a container whose creation has ended."""
        self._leases.pop(container_id, None)

    @property
    def root(self) -> Path:
        """The folder of the image store."""
        return self._store.root

    @property
    def lowest_layer(self) -> str:
        """The path of an empty folder that an image with a single layer gets as its second lower
        layer, because overlayfs needs two."""
        return str(self._store.layers.lowest)

    def annotations(
        self, image_id: str, references: Sequence[str] = ()
    ) -> builtins.list[frozenset[str]]:
        """Return the names of the annotations of the image's manifests, one set for each manifest.
        An image may have several manifests, for example of several repositories.

        With `references`, return only the set of the manifest that the first usable reference leads
        to. A reference is usable if it names the image, or if the image has a name in the
        reference's repository. If none is usable, return the sets of all manifests. The caller must
        then ignore annotations that are not in every set, because any user may push another
        manifest of the image. Raises NotFound.
        """
        contents = self._store.catalog.contents(image_id, references)
        return [content.manifest.annotations for content in contents]

    def names(self, image: Image, references: Sequence[str]) -> tuple[str, str]:
        """Return two names of the image: the first with a tag (with a digest if there is no tag),
        the second with a digest.

        Both names have the repository of the first usable one of `references`. A reference is
        usable if it names the image, or if the image has a name in the reference's repository. If
        none is usable, return the image's first names. For an image without names, return its id
        twice.
        """
        name = self._store.catalog.name_of(image.id, references)
        if name is not None and name.by_digest:
            return name.tagged or name.by_digest, name.by_digest
        digest = image.repo_digests[0] if image.repo_digests else image.id
        return image.repo_tags[0] if image.repo_tags else digest, digest

    def archive_limits(self) -> UnpackLimits:
        """Return how much an archive may unpack to on the store's disk. Raises ResourceExhausted
        when there is no space."""
        return self._store.space.limits_of_archive()

    def to_convert(self, image_id: str) -> str:
        """Return the form that `convert` would give the image, "mounted" or "unpacked"; "" if the
        image has this form already, or has no layers. Raises NotFound."""
        content = self._store.catalog.content(image_id)
        if content.mounted == self._store.policy.erofs or not content.diff_ids:
            return ""
        return "mounted" if self._store.policy.erofs else "unpacked"

    async def convert(self, image_id: str) -> bool:
        """Convert an image to the form that `[images] store` demands, from stored content, without
        a download. Return False without converting when a container uses the image.

        Raises NotFound, ResourceExhausted, KernelError.
        """

        def is_used() -> bool:
            return bool(self.in_use(image_id)) or self._is_leased(image_id)

        with self._store.errors():
            return await self._store.convert(image_id, is_used)

    async def mounts(self, image_ids: Sequence[str]) -> builtins.list[ImageMount]:
        """Return the mounts of these images. Unpacked images, which have no mount, are left out.
        Raises NotFound, KernelError."""
        image_mounts = [
            (await self.rootfs(image_id)).mount for image_id in dict.fromkeys(image_ids)
        ]
        return [mount for mount in image_mounts if mount is not None]

    async def details(self, image_id: str, reference: str = "") -> dict[str, Any]:
        """Return what `pyrunc-cri image` shows of an image: its labels, configuration and form, and
        each layer's digest and compressed size from the manifest that `reference` leads to. Raises
        NotFound."""
        content = self._store.catalog.contents(image_id, [reference])[0]
        data = await in_thread(
            lambda: self._store.blobs.read(content.manifest.config.digest, LIMIT_BYTES)
        )
        layers = [{"digest": layer.digest, "size": layer.size} for layer in content.manifest.layers]
        return {
            "chainID": content.chain[-1],
            "store": "mounted" if content.mounted else "unpacked",
            "files": self._paths_of(content).to_fields(),
            "labels": content.config.image.labels,
            "imageSpec": json.loads(data),
            "layers": layers,
        }

    def _paths_of(self, content: Content) -> ImagePaths:
        if content.mounted:
            return ImagePaths(self._store.files.image(content.diff_ids, content.chain))
        layers = [str(path) for path in self._store.layers.lower_dirs(content.chain)]
        return ImagePaths(lower=layers, place=str(self._store.files.place))

    async def tag(self, source: str, target: str) -> None:
        """Give the image `source` the additional name `target`. If another image has this name,
        that image loses it. Raises NotFound, InvalidArgument."""
        reference = Reference.parse(target)
        if reference.digest:
            raise InvalidArgument(f"{target}: a tag is a name without a digest")
        image, name = self._named(source)
        with self._store.errors():
            diff_ids = self._store.catalog.content(image.id).diff_ids
            async with self._store.loading():
                await self._store.publish(
                    [Name(reference.name, reference.tag, name.target)], diff_ids
                )

    def _named(self, reference: str) -> tuple[Image, Name]:
        """Return the image that `reference` leads to, and one of its names: the one that
        `reference` spells, or the first one if `reference` is an id. Raises NotFound."""
        catalog = self._store.catalog
        image = catalog.find(reference)
        if image is None:
            raise NotFound(f"no such image: {reference!r}")
        return image, catalog.name(reference) or catalog.names_of(image.id)[0]

    async def save(self, references: Sequence[str]) -> AsyncGenerator[bytes, None]:
        """Yield an archive of the images, in pieces of bytes. In the archive, an image that is
        named by tag has only this tag; an image that is named by id has all its tags. Raises
        NotFound, KernelError."""
        from cri_server.images.archives import export as exports  # takes 0.5 MiB with tarfile

        tags: dict[str, dict[str, None]] = {}  # by image id, without repetitions
        names: dict[str, Name] = {}
        for reference in references:
            image, name = self._named(reference)
            if id_matches(image.id, reference):
                chosen = image.repo_tags
            else:
                chosen = [name.tagged] if name.tagged else []
            tags.setdefault(image.id, {}).update(dict.fromkeys(chosen))
            names.setdefault(image.id, name)
        contents = {i: self._store.catalog.content_of(name) for i, name in names.items()}
        needed = [digest for c in contents.values() for digest in (*c.blobs, *c.diff_ids)]
        async with self._store.holding(needed):
            blobs = PlainLayers(self._store.root, self._store.files)
            images = []
            for image_id, content in contents.items():
                target = blobs.add(names[image_id].target, content.manifest, content.diff_ids)
                images.append((target, list(tags[image_id])))
            parts = exports.archive(blobs, images)
            while (part := await in_thread(lambda: next(parts, None))) is not None:
                yield part

    async def push(
        self, source: str, target: str, auth: Auth | None, progress: Callable[[Progress], None]
    ) -> str:
        """Push the image `source` to the registry, under the name `target`; return the digest of
        its manifest there.

        Raises NotFound, InvalidArgument, PeerError, DeadlineExceeded (no progress).
        """
        _, name = self._named(source)
        reference = Reference.parse(target)
        watch = Watch(self._no_progress_timeout_s, f"pushing {reference}")
        loop = asyncio.get_running_loop()

        def report(state: Progress) -> None:
            watch.touch()
            loop.call_soon_threadsafe(progress, state)

        def send(registry: Registry, host: RegistryHost) -> str:
            from cri_server.images.push import push

            return push(
                registry, host, self._store.blobs, self._store.files, name.target, reference, report
            )

        try:
            # Not `holding`: the digests of the layers that `push` compresses are not known yet.
            async with self._store.loading():
                return await self._at_registry(reference, auth, watch, send)
        finally:
            await self._store.collect()

    async def check_login(self, domain: str, auth: Auth) -> None:
        """Check that the registry `domain` accepts this login. Raises PeerError when the registry
        refuses the login or does not answer, NotFound when `domain` is no registry, InvalidArgument
        for a malformed `domain` or hosts.toml, DeadlineExceeded without progress."""
        reference = Reference.parse(f"{domain}/login")
        watch = Watch(self._no_progress_timeout_s, f"logging in to {domain}")
        await self._at_registry(reference, auth, watch, lambda registry, host: registry.check(host))

    async def _at_registry(
        self,
        reference: Reference,
        auth: Auth | None,
        watch: Watch,
        work: Callable[[Registry, RegistryHost], Outcome],
    ) -> Outcome:
        """Run `work` in a thread and return its result. `work` gets the registry's own host, never
        a mirror. Raises DeadlineExceeded when `watch` sees no progress."""
        from cri_server.images.pull import CONNECTION_READ_TIMEOUT_S
        from cri_server.images.registry.client import RegistrySession
        from cri_server.images.registry.hosts import hosts_for
        from cri_server.images.registry.registry import Registry

        session = RegistrySession(CONNECTION_READ_TIMEOUT_S, watch.touch)

        def run() -> Outcome:
            host = hosts_for(reference.registry, self._certs_dirs)[-1]
            # A push asks for each blob by HEAD first; for the token server this is a pull.
            return work(Registry(session, reference, [host], auth, actions="pull,push"), host)

        try:
            return await watch.guard(asyncio.create_task(in_thread(run, session.abort)))
        finally:
            session.close()

    async def load(self, path: Path, name: str | None = None) -> builtins.list[Image]:
        """Load all images of a docker-archive or OCI archive (a plain or compressed tar), with
        their tags; return them.

        `name`: replaces the names in the archive, which must then contain only one image. Raises
        InvalidArgument, NotFound (no image for this platform), ResourceExhausted, KernelError.
        """
        watch = Watch(self._no_progress_timeout_s, f"loading {path}")
        try:
            with self._store.errors():
                async with self._store.loading():
                    return await self._load(path, name, watch)
        finally:
            await self._store.collect()

    async def _load(self, path: Path, name: str | None, watch: Watch) -> builtins.list[Image]:
        limits = self._store.space.limits_of_archive()
        is_cancelled = threading.Event()
        with archives.open_archive(path) as fd:
            async with self._store.jobs.decoded(fd, limits) as archive:
                loaded = await in_thread(
                    lambda: archives.load(self._store.blobs, archive, name, is_cancelled.is_set),
                    is_cancelled.set,
                )
        return [await self._finish(image, watch) for image in loaded]

    async def _finish(self, image: archives.ArchivedImage, watch: Watch) -> Image:
        await self._store.maker.make_all(image.manifest, image.config.diff_ids, BlobSource(watch))
        names = [
            Name(r.name, r.tag if not r.digest else None, image.target) for r in image.references
        ]
        await self._store.publish(names or [Name("", None, image.target)], image.config.diff_ids)
        listed = self._store.catalog.find(image.manifest.config.digest)
        if listed is None:
            raise NotFound(f"image {image.manifest.config.digest} was removed while it was loaded")
        return listed

    def usage(self) -> StoreUsage:
        """Return the number of images, their bytes and inodes on disk, and the number of running
        pulls. Does not read the disk, because images are counted when they are added and
        removed."""
        size_bytes, inodes = self._store.totals()
        return StoreUsage(len(self._store.catalog.images()), size_bytes, inodes, len(self._tasks))

    async def unused(self) -> builtins.list[UnusedEntry]:
        """Return the files and folders of the store that no image needs."""
        await self._store.wait_deleted()
        return await in_thread(self._store.unused)

    async def discard(self, entry: UnusedEntry) -> bool:
        """Remove `entry`, a result of `unused`. Return False, and keep the entry, while a pull may
        need it. Raises ResourceExhausted, KernelError."""
        with self._store.errors():
            return await in_thread(lambda: self._store.discard(entry), abandon_s=None)


def _puller() -> type[Pull]:
    """Import and return the class Pull. The import of its HTTP client takes 50 ms, so it is done at
    the first pull, in a thread, not at the server's start."""
    from cri_server.images.pull import Pull

    return Pull


class _RunningPull:
    """A running pull and its callers. `is_ending`: all callers were cancelled, so the pull ends,
    and a later call must start a new one."""

    def __init__(self) -> None:
        self.task: asyncio.Task[str]
        self.is_ending = False
        self._waiting = 0
        self._listeners: builtins.list[Callable[[Progress], None]] = []

    def report(self, progress: Progress) -> None:
        for listener in self._listeners:
            listener(progress)

    async def join(self, progress: Callable[[Progress], None] | None) -> str:
        if progress is not None:
            self._listeners.append(progress)
        self._waiting += 1
        try:
            # A caller that is cancelled must not cancel the pull of the others.
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self._waiting == 1 and not self.task.done():
                self.is_ending = True
                self.task.cancel()
                await asyncio.wait([self.task])
            raise
        finally:
            self._waiting -= 1
            if progress is not None:
                self._listeners.remove(progress)


def _key(reference: Reference, auth: Auth | None) -> str:
    """Return a key that is equal for calls with the same reference and secret; such calls share one
    pull. The key does not show the secret."""
    fields = dataclasses.astuple(auth) if auth else ()
    return f"{reference} {digest_of(repr(fields).encode())}"
