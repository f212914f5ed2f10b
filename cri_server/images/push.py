"""Pushes an image: sends the blobs that the registry lacks, then the manifest under its tag.
Blocking: runs in a thread.

An image is pushed to the registry itself, never to a mirror. Each blob is sent with a single PUT.
Source: OCI distribution specification, "Push".
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode, urljoin, urlsplit

from cri_server.images.archives.export import platform_manifest
from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.manifest import Descriptor
from cri_server.images.formats.reference import Reference
from cri_server.images.model import Progress
from cri_server.images.registry.client import origin_of
from cri_server.images.registry.hosts import RegistryHost
from cri_server.images.registry.registry import Registry
from cri_server.images.store.blobs import Blobs
from cri_server.images.store.layer_blobs import compressed
from cri_server.images.store.layer_files import LayerFiles
from pyrunc.errors import PeerError

CHUNK_BYTES = 256 << 10


def push(
    registry: Registry,
    host: RegistryHost,
    blobs: Blobs,
    files: LayerFiles,
    target: Descriptor,
    reference: Reference,
    report: Callable[[Progress], None],
) -> str:
    """Send an image to the registry; return the digest of the manifest that was sent. A new
    manifest is made if layers had to be compressed again, or if the image's manifest also has
    entries that are not layers.

    The caller must prevent garbage collection of the store during the call. Raises Unauthorized,
    PeerError, NotFound.
    """
    target, manifest = platform_manifest(blobs, target)
    config = manifests.parse_config(blobs.read(manifest.config.digest, manifests.LIMIT_BYTES))

    def compressing() -> None:
        report(Progress(str(reference), "compressing"))

    layers = [
        layer
        if blobs.size(layer.digest) is not None or registry.has_blob(host, layer.digest)
        else compressed(blobs, files, diff_id, compressing)
        for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True)
    ]
    # A layer that was compressed again has a new digest, which the manifest must name.
    if layers != manifest.layers or manifest.others:
        manifest = manifests.with_layers(manifest, layers)
        data = manifests.encoded(manifest)
        target = Descriptor(manifests.OCI_MANIFEST, blobs.put(data), len(data))
    blobs_to_send = list({d.digest: d for d in (manifest.config, *manifest.layers)}.values())
    total, done = sum(d.size for d in blobs_to_send), 0
    for descriptor in blobs_to_send:
        before = done

        def arrived(count: int, before: int = before) -> None:
            report(Progress(str(reference), "sending", before + count, total))

        if not registry.has_blob(host, descriptor.digest):
            _send_blob(registry, host, blobs, descriptor, arrived)
        done += descriptor.size
        arrived(descriptor.size)
    data = blobs.read(target.digest, manifests.LIMIT_BYTES)
    kind = target.media_type or manifests.media_type(data)
    response = registry.request(
        "PUT",
        host,
        registry.url(host, f"manifests/{reference.target}"),
        {"Content-Type": kind},
        data,
    )
    registry.expect(host, response, f"manifests/{reference.target}", (200, 201, 202))
    report(Progress(str(reference), "done", total, total))
    return target.digest


def _send_blob(
    registry: Registry,
    host: RegistryHost,
    blobs: Blobs,
    descriptor: Descriptor,
    arrived: Callable[[int], None],
) -> None:
    begin = registry.url(host, "blobs/uploads/")
    response = registry.request("POST", host, begin, {"Content-Length": "0"}, b"")
    location = response.headers.get("Location", "")
    registry.expect(host, response, "blobs/uploads/", (202,))
    # A Location may be relative (distribution specification, "Pushing blobs"). Its query must stay:
    # there distribution has the upload's state.
    url = urljoin(begin, location)
    if not location or origin_of(urlsplit(url)) != origin_of(urlsplit(begin)):
        raise PeerError(
            f"{host.netloc}: the registry redirects the upload to another server: refused"
        )
    url += ("&" if urlsplit(url).query else "?") + urlencode(
        {"digest": descriptor.digest}, quote_via=quote
    )
    size = blobs.size(descriptor.digest) or 0
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
    with io.FileIO(blobs.open_blob(descriptor.digest)) as file:
        response = registry.request("PUT", host, url, headers, _read(file, arrived))
    registry.expect(host, response, f"blobs/{descriptor.digest}", (201, 204))


def _read(file: Any, arrived: Callable[[int], None]) -> Iterator[bytes]:
    count = 0
    while part := file.read(CHUNK_BYTES):
        yield part
        count += len(part)
        arrived(count)
