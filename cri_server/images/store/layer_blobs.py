"""Turns layers that are stored as tars back into blobs: plain for an archive, compressed for a
registry."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import algorithm_of, digest_of, hasher, hex_of
from cri_server.images.formats.manifest import Descriptor, Manifest
from cri_server.images.layers.incoming import DigestMismatch
from cri_server.images.store.blobs import Blobs, Ingest
from cri_server.images.store.layer_files import LayerFiles
from pyrunc.kernel.fd import open_memfd

_READ_BYTES = 1 << 20
_GZIP = 31  # zlib's window bits for a gzip member; its header has no time


class PlainLayers(Blobs):
    """Provides the blobs of an OCI layout for an export. A layer whose blob was removed is exported
    as its uncompressed tar."""

    def __init__(self, root: Path, files: LayerFiles) -> None:
        super().__init__(root)
        self._files = files
        self._documents: dict[str, bytes] = {}
        self._tars: dict[str, int] = {}

    def add(self, target: Descriptor, manifest: Manifest, diff_ids: Sequence[str]) -> Descriptor:
        """Return the descriptor to export for an image. `target`: the image's manifest, or an index
        that leads to it. Return `target` if all entries of the manifest are layers with a stored
        blob. Otherwise return a new manifest of the layers alone, in which tars replace the missing
        blobs."""
        layers = [self._layer(layer, d) for layer, d in zip(manifest.layers, diff_ids, strict=True)]
        if layers == manifest.layers and not manifest.others:
            return target
        data = manifests.encoded(manifests.with_layers(manifest, layers))
        digest = digest_of(data)
        self._documents[digest] = data
        return Descriptor(manifests.OCI_MANIFEST, digest, len(data))

    def _layer(self, layer: Descriptor, diff_id: str) -> Descriptor:
        if super().size(layer.digest) is not None:
            return layer
        size = self._tars[diff_id] = os.stat(self._files.tar(diff_id)).st_size
        return Descriptor(manifests.OCI_LAYER, diff_id, size)

    def read(self, digest: str, limit_bytes: int) -> bytes:
        return self._documents.get(digest) or super().read(digest, limit_bytes)

    def size(self, digest: str) -> int | None:
        if digest in self._documents:
            return len(self._documents[digest])
        return self._tars.get(digest) or super().size(digest)

    def open_blob(self, digest: str) -> int:
        if digest in self._documents:
            return open_memfd("manifest", self._documents[digest])
        if digest in self._tars:
            return self._files.open_tar(digest)
        return super().open_blob(digest)


def compressed(
    blobs: Blobs, files: LayerFiles, diff_id: str, tick: Callable[[], None]
) -> Descriptor:
    """Compress the tar of a layer to a gzip blob in the OCI layout; return its descriptor. The
    caller must prevent garbage collection of the store during the call (`Store.loading`). `tick` is
    called for each MiB, and may raise. Raises NotFound, DigestMismatch (the tar is damaged on
    disk), ResourceExhausted, OSError."""
    from isal import isal_zlib  # takes 0.3 MiB, and few servers push images

    # isal has the levels 0 to 3.
    compressor = isal_zlib.compressobj(3, isal_zlib.DEFLATED, _GZIP)
    content = hasher(algorithm_of(diff_id))
    with Ingest(blobs) as ingest, io.FileIO(files.open_tar(diff_id)) as tar:
        while part := tar.read(_READ_BYTES):
            content.update(part)
            ingest.write(compressor.compress(part))
            tick()
        ingest.write(compressor.flush())
        if content.hexdigest() != hex_of(diff_id):
            raise DigestMismatch(f"the tar of layer {diff_id} is damaged on disk")
        return Descriptor(f"{manifests.OCI_LAYER}+gzip", ingest.commit(), ingest.size)
