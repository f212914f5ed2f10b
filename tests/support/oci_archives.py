"""Writes images in the form of a registry or an OCI layout: manifests, compressed blobs, and a
layout in a tar."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from cri_server.images.archives.build import BuiltImage, LayerFile, layer
from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import digest_of


def oci_archive(
    images: Mapping[str, BuiltImage],
    compress: str = "gzip",
    annotations: Mapping[str, str] | None = None,
) -> bytes:
    """Return an OCI layout in a tar.

    `images` maps a name, which becomes `org.opencontainers.image.ref.name`, to an image;
    `annotations` are those of each manifest.
    """
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}
    entries = []
    for name, built in images.items():
        data, blobs = manifest_of(built, compress)
        if annotations:
            data = json.dumps({**json.loads(data), "annotations": dict(annotations)}).encode()
        files |= {_blob_path(digest): blob for digest, blob in blobs.items()}
        files[_blob_path(digest_of(data))] = data
        named = {"org.opencontainers.image.ref.name": name}
        entries.append({**descriptor(data, manifests.OCI_MANIFEST), "annotations": named})
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    return layer({name: LayerFile(data) for name, data in files.items()}, parents=False)


def manifest_of(
    built: BuiltImage, compress: str = "gzip", docker: bool = False
) -> tuple[bytes, dict[str, bytes]]:
    """Return an image's manifest and its blobs by digest; `compress`: gzip, zstd or ""."""
    packed = [compressed(data, compress) for data in built.layers]
    config_type = manifests.DOCKER_CONFIG if docker else manifests.OCI_CONFIG
    layer_type = "application/vnd.docker.image.rootfs.diff.tar" if docker else manifests.OCI_LAYER
    suffix = "" if not compress else f".{compress}" if docker else f"+{compress}"
    document = {
        "schemaVersion": 2,
        "mediaType": manifests.DOCKER_MANIFEST if docker else manifests.OCI_MANIFEST,
        "config": descriptor(built.config, config_type),
        "layers": [descriptor(data, layer_type + suffix) for data in packed],
    }
    blobs = {digest_of(data): data for data in (built.config, *packed)}
    return json.dumps(document).encode(), blobs


def descriptor(data: bytes, media_type: str) -> dict[str, Any]:
    """Return a blob's descriptor for a manifest."""
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def compressed(data: bytes, kind: str) -> bytes:
    if kind == "zstd":
        return bytes(zstd.compress(data))
    return gzip.compress(data, compresslevel=1, mtime=0) if kind == "gzip" else data


def _blob_path(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")
