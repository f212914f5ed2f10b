"""Reads images from a file: a docker-archive (`docker save`, `skopeo copy … docker-archive:`) or an
OCI layout in a tar.

The archive is read once, front to back: each file goes to the image store as a blob, and is
interpreted at the end. Docker's newer archives have both forms; then the archive's OCI layout is
used, and the names come from `manifest.json`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import ALGORITHMS, algorithm_of, is_digest
from cri_server.images.formats.manifest import Descriptor, ImageIndex, Manifest
from cri_server.images.formats.reference import Reference
from cri_server.images.layers import tar_headers
from cri_server.images.layers.inflate import GZIP_MAGIC, ZSTD_MAGIC, BadLayer, TarStream
from cri_server.images.store.blobs import Blobs, Ingest
from cri_server.images.waiting import Abandoned
from pyrunc.errors import (
    Error,
    InvalidArgument,
    KernelError,
    NotFound,
    PeerError,
    Unavailable,
    kernel_errors,
)
from pyrunc.kernel.fd import closing_fd

log = logging.getLogger(__name__)

FILES_LIMIT = 20_000
IMAGES_LIMIT = 1000
_CONTAINERD_NAME = "io.containerd.image.name"
_OCI_NAME = "org.opencontainers.image.ref.name"


@dataclass(slots=True)
class ArchivedImage:
    """An image of an archive; the image store has all of its blobs. `references` may be empty."""

    target: Descriptor
    manifest: Manifest
    config: manifests.ImageConfiguration
    references: list[Reference]


class _Archive:
    """The content of an archive: its files as blobs of the image store, its links, and its parsed
    manifests and configurations. Each is parsed only once."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._files: dict[str, str] = {}  # name -> digest of the blob
        self._links: dict[str, str] = {}  # name -> target
        self._digests: set[str] = set()
        self._parse = cache(lambda digest, kind: manifests.parse(self.read(digest), kind))
        self.config = cache(lambda digest: manifests.parse_config(self.read(digest)))

    def add_file(self, name: str, digest: str) -> None:
        """Record that the archive's file `name` is stored as the blob `digest`."""
        self._files[name] = digest
        self._digests.add(digest)

    def add_link(self, name: str, target: bytes) -> None:
        """Record a symbolic or hard link; `target` is relative to the archive's root."""
        self._links[name] = _clean(target)

    def digest(self, name: str) -> str | None:
        """Return the digest of a file, also through links; None if the archive lacks the file."""
        name = _clean(os.fsencode(name))
        # `docker save` of older versions writes a repeated layer as a link to the first one; a
        # hostile archive's links may form a ring.
        for _ in range(8):
            if name in self._files:
                return self._files[name]
            if name not in self._links:
                return None
            name = self._links[name]
        return None

    def required_digest(self, name: str) -> str:
        """Return the digest of a file that manifest.json names. Raises BadLayer."""
        digest = self.digest(name)
        if digest is None or not is_digest(digest):
            raise BadLayer(f"manifest.json names {name[:200]!r}, which is not in the archive")
        return digest

    def json(self, name: str, kind: type[Any]) -> Any:
        """Return the parsed JSON of a file; None if the archive lacks the file. Raises BadLayer for
        a malformed file, or if its value is not a `kind`."""
        digest = self.digest(name)
        if digest is None:
            return None
        try:
            value = json.loads(self.read(digest))
        except (ValueError, RecursionError) as error:
            raise BadLayer(f"{name}: not JSON: {str(error)[:200]}") from None
        if not isinstance(value, kind):
            raise BadLayer(f"{name}: not a {kind.__name__}")
        return value

    def read(self, digest: str) -> bytes:
        """Read a JSON file of the archive, such as a manifest, and verify its digest. Raises
        NotFound if no file of the archive has this digest, even if the image store has such a blob
        from elsewhere; DigestMismatch if the content is damaged or too long."""
        # An archive that names an image of the node would otherwise get that image's content.
        if digest not in self._digests:
            raise NotFound(f"the archive has no blob {digest}")
        return self._blobs.read(digest, manifests.LIMIT_BYTES)

    def size(self, digest: str) -> int | None:
        """Return the size of a blob; None if the archive lacks it."""
        return self._blobs.size(digest) if digest in self._digests else None

    def layer(self, digest: str) -> Descriptor:
        """Return the descriptor of a layer; the layer's first bytes tell the media type."""
        with closing_fd(self._blobs.open_blob(digest)) as fd:
            magic = os.read(fd, 4)
        suffix = "+gzip" if magic.startswith(GZIP_MAGIC) else "+zstd" if magic == ZSTD_MAGIC else ""
        return Descriptor(manifests.OCI_LAYER + suffix, digest, self.size(digest) or 0)

    def put_manifest(self, manifest: Manifest) -> Descriptor:
        """Store a manifest that was made from the archive's metadata files."""
        data = manifests.encoded(manifest)
        return Descriptor(manifests.OCI_MANIFEST, self._blobs.put(data), len(data))

    def manifest(self, descriptor: Descriptor) -> Manifest | None:
        """Return the manifest for this machine that a descriptor leads to; None for an artifact or
        an unknown media type. Raises BadManifest, NotFound."""

        def read(target: Descriptor) -> Manifest | ImageIndex:
            if target.media_type not in manifests.ACCEPTED:
                raise manifests.Artifact(target.media_type)
            return self._parse(target.digest, target.media_type)

        try:
            return manifests.follow(descriptor, read, self._digests.__contains__)[1]
        except manifests.Artifact:
            return None


@contextmanager
def open_archive(path: Path) -> Iterator[int]:
    """Open the archive for a `with` block. If the block raises an error about the archive, the
    error's message gets the archive's path. Raises InvalidArgument (not an archive, or a damaged
    one), KernelError."""
    with kernel_errors("open", f"'{path}'"):
        # O_NONBLOCK: a named pipe without a writer must not block.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(fd, True)
    try:
        yield fd
    except Unavailable:
        raise
    except PeerError as error:
        raise InvalidArgument(f"{path}: {error.message}") from None
    except OSError as error:
        # Errors of the store's files have a file name; the archive is read by descriptor.
        if error.filename is not None:
            raise
        raise KernelError.of(error, "read", f"'{path}'") from None
    finally:
        os.close(fd)


def load(
    blobs: Blobs,
    archive: TarStream,
    name: str | None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[ArchivedImage]:
    """Store the archive's blobs in the image store; return the archive's images. Blocking.
    `name`: the reference for the only image in the archive; None to use the archive's names. Raises
    Abandoned once `is_cancelled` returns true.

    The caller must remove the blobs that no image needs, also after an error. Raises BadLayer,
    BadManifest, InvalidArgument, NotFound, ResourceExhausted, OSError.
    """
    content = _read(blobs, archive, is_cancelled)
    return _images(content, Reference.parse(name) if name else None)


def _read(blobs: Blobs, stream: TarStream, is_cancelled: Callable[[], bool]) -> _Archive:
    archive = _Archive(blobs)
    for count, entry in enumerate(tar_headers.members(stream)):
        name = _clean(entry.name)
        if count > FILES_LIMIT:
            raise BadLayer(f"the archive has more than {FILES_LIMIT} files")
        if entry.kind == tar_headers.FILE:
            archive.add_file(name, _blob(blobs, stream, entry, name, is_cancelled))
        elif entry.kind == tar_headers.SYMLINK:
            archive.add_link(name, os.path.join(os.path.dirname(entry.name), entry.link))
        elif entry.kind == tar_headers.HARDLINK:
            archive.add_link(name, entry.link)
    stream.drain()
    return archive


def _blob(
    blobs: Blobs,
    stream: TarStream,
    entry: tar_headers.TarMember,
    name: str,
    is_cancelled: Callable[[], bool],
) -> str:
    if entry.sparse is not None:
        raise BadLayer(
            f"{tar_headers.quoted(entry.name)}: sparse files are not supported in an archive"
            " of images"
        )
    digest = _digest_in_layout(name)
    with Ingest(blobs, algorithm_of(digest)) as ingest:
        for piece in stream.pieces(entry.stored):
            ingest.write(bytes(piece))
            if is_cancelled():
                raise Abandoned
        if ingest.size < entry.stored:
            raise BadLayer("the archive is truncated")
        if digest is not None and ingest.digest != digest:
            raise BadLayer(f"{name}: the content has the digest {ingest.digest}")
        return ingest.commit()


def _digest_in_layout(name: str) -> str | None:
    """Return the digest in the name of a blob (`blobs/ALGORITHM/HEX`) of an OCI layout; None for
    any other file."""
    folder, algorithm, digits = (*name.split("/"), "", "")[:3]
    is_blob = folder == "blobs" and algorithm in ALGORITHMS and name.count("/") == 2
    return f"{algorithm}:{digits}" if is_blob else None


def _clean(name: bytes) -> str:
    return os.path.normpath("/" + os.fsdecode(name)).lstrip("/")


def _images(archive: _Archive, name: Reference | None) -> list[ArchivedImage]:
    docker = archive.json("manifest.json", list)
    index = archive.digest("index.json")
    if index is not None:
        images = _from_layout(archive, index, docker or [])
    elif docker is not None:
        if len(docker) > IMAGES_LIMIT:
            raise BadLayer(f"manifest.json: more than {IMAGES_LIMIT} images")
        images = [_from_docker(archive, item) for item in docker]
    else:
        raise BadLayer("not an archive of images: it has neither index.json nor manifest.json")
    if not images:
        raise BadLayer("the archive has no image for this machine")
    if name is not None:
        if len(images) > 1:
            raise InvalidArgument("cannot name the image: the archive has more than one")
        images[0].references = [name]
    return images


def _from_layout(archive: _Archive, digest: str, docker: list[Any]) -> list[ArchivedImage]:
    """Return the images of the OCI layout whose index.json has this digest. `docker`: the parsed
    manifest.json; its names are added to the images with the same configuration."""
    index = manifests.parse(archive.read(digest), manifests.OCI_INDEX)
    assert isinstance(index, ImageIndex)
    tags = {
        archive.digest(str(item.get("Config"))): _repo_tags(item)
        for item in docker
        if isinstance(item, dict)
    }
    images: dict[Descriptor, ArchivedImage] = {}
    names: dict[Descriptor, list[str]] = {}
    for descriptor in index.manifests:
        manifest = archive.manifest(descriptor)
        if manifest is None:
            continue
        config = _config(archive, manifest)
        target = descriptor.plain()
        images.setdefault(target, ArchivedImage(target, manifest, config, []))
        names.setdefault(target, []).extend(
            [*_annotated(descriptor), *tags.pop(manifest.config.digest, [])]
        )
    for target, image in images.items():
        image.references = _references(names[target])
    return list(images.values())


def _annotated(descriptor: Descriptor) -> list[str]:
    """Return a list with the image's name from a descriptor's annotations. The list is empty if the
    annotations contain no name, or only a tag (OCI's `org.opencontainers.image.ref.name` may be a
    tag alone)."""
    annotations = descriptor.annotations or {}
    name = annotations.get(_CONTAINERD_NAME) or annotations.get(_OCI_NAME, "")
    return [name] if "/" in name or ":" in name else []


def _from_docker(archive: _Archive, item: Any) -> ArchivedImage:
    """Return the image that `item`, an entry of manifest.json, describes."""
    if not isinstance(item, dict) or not isinstance(item.get("Layers"), list):
        raise BadLayer("manifest.json: an entry is not an image")
    if len(item["Layers"]) > manifests.LAYERS_LIMIT:
        raise BadLayer(f"manifest.json: more than {manifests.LAYERS_LIMIT} layers")
    config = archive.required_digest(str(item.get("Config")))
    layers = [archive.layer(archive.required_digest(str(name))) for name in item["Layers"]]
    size = archive.size(config) or 0
    manifest = Manifest(Descriptor(manifests.OCI_CONFIG, config, size), layers)
    target = archive.put_manifest(manifest)
    return ArchivedImage(
        target, manifest, _config(archive, manifest), _references(_repo_tags(item))
    )


def _repo_tags(item: dict[str, Any]) -> list[Any]:
    names = item.get("RepoTags") or []
    if not isinstance(names, list):
        raise BadLayer("manifest.json: RepoTags is not a list")
    return names


def _config(archive: _Archive, manifest: Manifest) -> manifests.ImageConfiguration:
    """Return the image's configuration. Raises BadLayer if the archive lacks one of the layers."""
    config = archive.config(manifest.config.digest)
    if warning := manifests.foreign_platform(config):
        log.warning("image %s of an archive: %s", manifest.config.digest, warning)
    manifests.check_layers(manifest, config)
    for layer in manifest.layers:
        if archive.size(layer.digest) != layer.size:
            raise BadLayer(f"the archive lacks layer {layer.digest}, or its size is wrong")
    return config


def _references(names: list[Any]) -> list[Reference]:
    references = []
    for name in names:
        try:
            references.append(Reference.parse(str(name)))
        except Error as error:
            raise BadLayer(error.message) from None
    return list(dict.fromkeys(references))
