"""Reads images from a file: a docker-archive (`docker save`, `skopeo copy … docker-archive:`) or an
OCI layout in a tar.

The archive is read once, front to back: each file goes to the layout as a blob, and is interpreted
at the end. Docker's newer archives have both forms; then the layout is used, and the names come
from `manifest.json`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import ALGORITHMS, algorithm_of, is_digest
from cri_server.images.formats.manifest import Descriptor, Index, Manifest
from cri_server.images.formats.reference import Reference
from cri_server.images.layers import tar_headers
from cri_server.images.layers.inflate import GZIP_MAGIC, ZSTD_MAGIC, BadLayer, Stream
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
class Loaded:
    """An image of an archive, all of whose blobs are in the layout. `references` may be empty."""

    target: Descriptor
    manifest: Manifest
    config: manifests.Config
    references: list[Reference]


@dataclass(slots=True)
class _Archive:
    """An archive's members: name -> blob digest, name of a link -> its target."""

    digests: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


class _ArchiveBlobs:
    """The layout's blobs that came with the archive: an image must not use others that its
    documents name."""

    def __init__(self, blobs: Blobs, archive: _Archive) -> None:
        self._blobs = blobs
        self._digests = set(archive.digests.values())

    def read(self, digest: str, limit_bytes: int) -> bytes:
        """Read and verify a blob. Raises NotFound, DigestMismatch."""
        # An archive that names an image of the node without having it would otherwise be given its
        # content.
        if digest not in self._digests:
            raise NotFound(f"the archive has no blob {digest}")
        return self._blobs.read(digest, limit_bytes)

    def size(self, digest: str) -> int | None:
        """The blob's size; None if the archive does not have it."""
        return self._blobs.size(digest) if digest in self._digests else None

    def open_blob(self, digest: str) -> int:
        """Open a blob for reading; the caller closes it. Raises NotFound."""
        return self._blobs.open_blob(digest)

    def put(self, data: bytes) -> str:
        """Store a document made from the archive's; return its digest."""
        return self._blobs.put(data)


class _DocumentCache:
    """Parsed documents of the archive, each parsed once however many images name it."""

    def __init__(self, blobs: _ArchiveBlobs) -> None:
        self._blobs = blobs
        self._manifests: dict[tuple[str, str], Manifest | Index] = {}
        self._configs: dict[str, manifests.Config] = {}

    def has(self, digest: str) -> bool:
        """Whether the archive has that blob."""
        return self._blobs.size(digest) is not None

    def manifest(self, descriptor: Descriptor) -> Manifest | Index:
        """Parse a manifest or an index. Raises BadManifest, NotFound."""
        key = (descriptor.digest, descriptor.media_type)
        if key not in self._manifests:
            data = self._blobs.read(descriptor.digest, manifests.LIMIT_BYTES)
            self._manifests[key] = manifests.parse(data, descriptor.media_type)
        return self._manifests[key]

    def config(self, digest: str) -> manifests.Config:
        """Parse a configuration. Raises BadManifest, NotFound."""
        if digest not in self._configs:
            self._configs[digest] = manifests.parse_config(
                self._blobs.read(digest, manifests.LIMIT_BYTES)
            )
        return self._configs[digest]


@contextmanager
def open_archive(path: Path) -> Iterator[int]:
    """Open the archive for the block; errors about its content get its name. Raises InvalidArgument
    (not an archive, or a damaged one), KernelError."""
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
    archive: Stream,
    name: str | None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> list[Loaded]:
    """Store the archive's blobs in the layout; return the images that they make. Blocking. Raises
    Abandoned once `is_cancelled`.

    The caller collects blobs that no image needs, also after an error. Raises BadLayer,
    BadManifest, InvalidArgument, NotFound, ResourceExhausted, OSError.
    """
    content = _read(blobs, archive, is_cancelled)
    return _images(_ArchiveBlobs(blobs, content), content, Reference.parse(name) if name else None)


def _read(blobs: Blobs, stream: Stream, is_cancelled: Callable[[], bool]) -> _Archive:
    archive = _Archive()
    for count, entry in enumerate(tar_headers.members(stream)):
        name = _clean(entry.name)
        if count > FILES_LIMIT:
            raise BadLayer(f"the archive has more than {FILES_LIMIT} files")
        if entry.kind == tar_headers.FILE:
            archive.digests[name] = _blob(blobs, stream, entry, name, is_cancelled)
        elif entry.kind == tar_headers.SYMLINK:
            archive.links[name] = _clean(os.path.join(os.path.dirname(entry.name), entry.link))
        elif entry.kind == tar_headers.HARDLINK:
            archive.links[name] = _clean(entry.link)
    stream.drain()
    return archive


def _blob(
    blobs: Blobs,
    stream: Stream,
    entry: tar_headers.Entry,
    name: str,
    is_cancelled: Callable[[], bool],
) -> str:
    if entry.sparse is not None:
        raise BadLayer(f"{tar_headers.quoted(entry.name)}: a sparse file in an archive of images")
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
    """The digest in the name of a file of an OCI layout; None for other files."""
    folder, algorithm, digits = (*name.split("/"), "", "")[:3]
    is_blob = folder == "blobs" and algorithm in ALGORITHMS and name.count("/") == 2
    return f"{algorithm}:{digits}" if is_blob else None


def _clean(name: bytes) -> str:
    return os.path.normpath("/" + os.fsdecode(name)).lstrip("/")


def _images(blobs: _ArchiveBlobs, archive: _Archive, name: Reference | None) -> list[Loaded]:
    docker = _json(blobs, archive, "manifest.json", list)
    index = _digest(archive, "index.json")
    if index is not None:
        images = _from_layout(blobs, archive, index, docker or [])
    elif docker is not None:
        if len(docker) > IMAGES_LIMIT:
            raise BadLayer(f"manifest.json: more than {IMAGES_LIMIT} images")
        parsed = _DocumentCache(blobs)
        images = [_from_docker(blobs, archive, item, parsed) for item in docker]
    else:
        raise BadLayer("not an archive of images: it has neither index.json nor manifest.json")
    if not images:
        raise BadLayer("the archive has no image for this machine")
    if name is not None:
        if len(images) > 1:
            raise InvalidArgument("cannot name the image: the archive has more than one")
        images[0].references = [name]
    return images


# ---- OCI layout


def _from_layout(
    blobs: _ArchiveBlobs, archive: _Archive, digest: str, docker: list[Any]
) -> list[Loaded]:
    index = manifests.parse(blobs.read(digest, manifests.LIMIT_BYTES), manifests.OCI_INDEX)
    assert isinstance(index, Index)
    tags = {
        _digest(archive, str(item.get("Config"))): _repo_tags(item)
        for item in docker
        if isinstance(item, dict)
    }
    images, parsed = dict[Descriptor, tuple[Loaded, list[str]]](), _DocumentCache(blobs)
    for descriptor in index.manifests:
        manifest = _choose(parsed, descriptor)
        if manifest is None:
            continue
        config = _config(blobs, manifest, parsed)
        names = [*_annotated(descriptor), *tags.pop(manifest.config.digest, [])]
        target = Descriptor(descriptor.media_type, descriptor.digest, descriptor.size)
        images.setdefault(target, (Loaded(target, manifest, config, []), []))[1].extend(names)
    for image, names in images.values():
        image.references = _references(names)
    return [image for image, _ in images.values()]


def _choose(parsed: _DocumentCache, descriptor: Descriptor) -> Manifest | None:
    """The manifest for this machine that a descriptor leads to; None for an artifact or another
    media type."""

    def read(target: Descriptor) -> Manifest | Index:
        if target.media_type not in manifests.ACCEPTED:
            raise manifests.Artifact(target.media_type)
        return parsed.manifest(target)

    try:
        return manifests.follow(descriptor, read, parsed.has)[1]
    except manifests.Artifact:
        return None


def _annotated(descriptor: Descriptor) -> list[str]:
    """The image's name in a descriptor's annotations. containerd's holds the whole name; the
    standard one may be only a tag, which is no name."""
    annotations = descriptor.annotations or {}
    name = annotations.get(_CONTAINERD_NAME) or annotations.get(_OCI_NAME, "")
    return [name] if "/" in name or ":" in name else []


# ---- docker-archive


def _from_docker(
    blobs: _ArchiveBlobs, archive: _Archive, item: Any, parsed: _DocumentCache
) -> Loaded:
    if not isinstance(item, dict) or not isinstance(item.get("Layers"), list):
        raise BadLayer("manifest.json: an entry is not an image")
    if len(item["Layers"]) > manifests.LAYERS_LIMIT:
        raise BadLayer(f"manifest.json: more than {manifests.LAYERS_LIMIT} layers")
    config_digest = _required_digest(archive, str(item.get("Config")))
    layers = [_layer(blobs, _required_digest(archive, str(layer))) for layer in item["Layers"]]
    size = blobs.size(config_digest) or 0
    manifest = Manifest(Descriptor(manifests.OCI_CONFIG, config_digest, size), layers)
    data = manifests.encoded(manifest)
    target = Descriptor(manifests.OCI_MANIFEST, blobs.put(data), len(data))
    return Loaded(target, manifest, _config(blobs, manifest, parsed), _references(_repo_tags(item)))


def _repo_tags(item: dict[str, Any]) -> list[Any]:
    names = item.get("RepoTags") or []
    if not isinstance(names, list):
        raise BadLayer("manifest.json: RepoTags is not a list")
    return names


def _layer(blobs: _ArchiveBlobs, digest: str) -> Descriptor:
    with closing_fd(blobs.open_blob(digest)) as fd:
        magic = os.read(fd, 4)
    suffix = "+gzip" if magic.startswith(GZIP_MAGIC) else "+zstd" if magic == ZSTD_MAGIC else ""
    return Descriptor(manifests.OCI_LAYER + suffix, digest, blobs.size(digest) or 0)


# ---- both


def _config(blobs: _ArchiveBlobs, manifest: Manifest, parsed: _DocumentCache) -> manifests.Config:
    config = parsed.config(manifest.config.digest)
    if words := manifests.foreign_platform(config):
        log.warning("image %s of an archive: %s", manifest.config.digest, words)
    manifests.check_layers(manifest, config)
    for layer in manifest.layers:
        if blobs.size(layer.digest) != layer.size:
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


def _digest(archive: _Archive, name: str) -> str | None:
    name = _clean(os.fsencode(name))
    # `docker save` of older versions writes a repeated layer as a link to the first one; a hostile
    # archive's links may form a ring.
    for _ in range(8):
        if name in archive.digests:
            return archive.digests[name]
        if name not in archive.links:
            return None
        name = archive.links[name]
    return None


def _required_digest(archive: _Archive, name: str) -> str:
    digest = _digest(archive, name)
    if digest is None or not is_digest(digest):
        raise BadLayer(f"manifest.json names {name[:200]!r}, which is not in the archive")
    return digest


def _json(blobs: _ArchiveBlobs, archive: _Archive, name: str, kind: type[Any]) -> Any:
    digest = _digest(archive, name)
    if digest is None:
        return None
    try:
        value = json.loads(blobs.read(digest, manifests.LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise BadLayer(f"{name}: not JSON: {str(error)[:200]}") from None
    if not isinstance(value, kind):
        raise BadLayer(f"{name}: not a {kind.__name__}")
    return value
