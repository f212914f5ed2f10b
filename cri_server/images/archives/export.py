"""Writes images as a stream of bytes: an OCI image layout in a tar that is also a docker-archive
(`manifest.json`).

The store has only what this machine's platform needs, so an index is replaced by the manifest
chosen from it.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence

import msgspec

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.manifest import Descriptor, Manifest
from cri_server.images.store.blobs import LAYOUT, Blobs

CHUNK_BYTES = 1 << 20
_NAME = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"


def platform_manifest(blobs: Blobs, target: Descriptor) -> tuple[Descriptor, Manifest]:
    """Return the manifest for this machine, with its descriptor: `target` itself, or one that the
    index at `target` names. Raises BadManifest, NotFound."""
    return manifests.follow(
        target,
        lambda d: manifests.parse(blobs.read(d.digest, manifests.LIMIT_BYTES), d.media_type),
        lambda digest: blobs.size(digest) is not None,
    )


def archive(blobs: Blobs, images: Sequence[tuple[Descriptor, Sequence[str]]]) -> Iterator[bytes]:
    """Yield the archive in parts; blocking. `images`: the descriptor of each image, and its tags in
    the archive. The caller holds leases on the blobs. Raises Error, OSError."""
    index, legacy = [], []
    needed: dict[str, None] = {}
    for descriptor, tags in images:
        target, manifest = platform_manifest(blobs, descriptor)
        needed |= dict.fromkeys(
            [target.digest, manifest.config.digest, *(d.digest for d in manifest.layers)]
        )
        for tag in tags or [""]:
            index.append(_entry(blobs, target, tag))
        legacy.append(
            {
                "Config": _place(manifest.config.digest),
                # `docker save` writes null for an image without a tag.
                "RepoTags": list(tags) or None,
                "Layers": [_place(layer.digest) for layer in manifest.layers],
            }
        )
    yield from _file("oci-layout", LAYOUT)
    for digest in needed:
        yield from _blob(blobs, digest)
    document = {"schemaVersion": 2, "mediaType": manifests.OCI_INDEX, "manifests": index}
    yield from _file("index.json", msgspec.json.encode(document))
    yield from _file("manifest.json", json.dumps(legacy).encode())
    # Two empty blocks end a tar (POSIX pax, "ustar Interchange Format").
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _entry(blobs: Blobs, target: Descriptor, tag: str) -> Descriptor:
    """Return the entry of index.json that names the image `target` as `tag`; an empty `tag` gives
    an entry without a name."""
    # docker writes the tag alone under the standard key, too; containerd's key has the whole name.
    names = {_NAME: tag.rpartition(":")[2], _CONTAINERD_NAME: tag} if tag else None
    kind = target.media_type or manifests.OCI_MANIFEST
    size = blobs.size(target.digest) or target.size
    return Descriptor(kind, target.digest, size, annotations=names)


def _place(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _head(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)  # equals ustar unless a name has 128 digits


def _padding(size: int) -> bytes:
    return b"\0" * (-size % tarfile.BLOCKSIZE)


def _file(name: str, content: bytes) -> Iterator[bytes]:
    yield _head(name, len(content)) + content + _padding(len(content))


def _blob(blobs: Blobs, digest: str) -> Iterator[bytes]:
    size = blobs.size(digest) or 0
    with io.FileIO(blobs.open_blob(digest)) as file:
        yield _head(_place(digest), size)
        while part := file.read(CHUNK_BYTES):
            yield part
    yield _padding(size)
