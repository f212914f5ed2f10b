"""Manifests, indexes and image configurations of Docker and OCI, parsed from hostile JSON into
typed values.

An ambiguous document is refused: keys that occur twice, `layers` beside `manifests`, a media type
that contradicts the Content-Type. Sizes and counts are checked against limits before the content
that a document names is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from cri_server import typed
from cri_server.images.formats.digests import is_digest
from cri_server.images.formats.platforms import Platform as Platform
from cri_server.images.formats.platforms import host_platform as host_platform
from cri_server.images.formats.platforms import host_processors, processor, rank
from pyrunc.errors import NotFound, PeerError, Unsupported

# The size that registries should accept at least (distribution specification, "Pushing Manifests").
LIMIT_BYTES = 4 << 20
# OVL_MAX_STACK of Linux (fs/overlayfs): an overlay has no more lower layers.
LAYERS_LIMIT = 500
INDEX_ENTRIES_LIMIT = 1000
DEPTH_LIMIT = 4
# Limits a manifest's annotations, and the entries of all lists and maps in a configuration
# together. They stay in memory while the image is stored.
ENTRIES_LIMIT = 10_000
BLOB_LIMIT_BYTES = 64 << 30

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
INDEXES = (OCI_INDEX, DOCKER_INDEX)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
ACCEPTED = (*INDEXES, *MANIFESTS)
# From release candidates of the specification.
_ARTIFACT_MANIFEST = "application/vnd.oci.artifact.manifest.v1+json"
_EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"
_GENERIC = ("", "application/json", "application/octet-stream", "text/plain", "binary/octet-stream")
# Layers with "foreign" or "nondistributable" come from the registry like others. Following their
# `urls` sent the registry's credentials to any host (CVE-2020-15157 of containerd).
_LAYER_PREFIXES = (
    OCI_LAYER,
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)
# Media types of images' configurations. Old registries write the generic ones (distribution
# issue 1621).
_IMAGE_CONFIGS = (OCI_CONFIG, DOCKER_CONFIG, *_GENERIC, "text/html")
RESERVED_LABELS = ("io.kubernetes.", "org.pyrunc.")
# In JSON: a surrogate pair, a surrogate without its other half (group 1), or text without `\u`. One
# match for each escape would take a second for 4 MiB of `\\a`.
_SURROGATES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|(?:[^\\]++|\\[^u])++"
)


class BadManifest(PeerError):
    """A manifest, index or image configuration is malformed, ambiguous, or exceeds a limit."""


class Artifact(Unsupported):
    """The manifest describes an OCI artifact that is not an image: a chart, a signature, a
    model."""


class Descriptor(
    msgspec.Struct, frozen=True, rename={"media_type": "mediaType"}, omit_defaults=True
):
    """Names a blob by digest and size. The field `urls` is not even parsed, because with it an
    image's author could make the node send requests anywhere."""

    media_type: str
    digest: str
    size: int
    platform: Platform | None = None
    annotations: dict[str, str] | None = None

    def plain(self) -> Descriptor:
        """Return the descriptor without platform and annotations."""
        return Descriptor(self.media_type, self.digest, self.size)

    def check(self, what: str) -> None:
        """Check digest and size. `what`: the descriptor's name in an error. Raises BadManifest."""
        if not is_digest(self.digest):
            raise BadManifest(
                f"{what}: digest {self.digest[:100]!r} is not a sha256 or sha512 digest"
                " in lower case"
            )
        if not 0 <= self.size <= BLOB_LIMIT_BYTES:
            raise BadManifest(f"{what}: size {self.size} is out of range")


class Manifest(msgspec.Struct, frozen=True):
    """An image's configuration and layers, bottom first. `annotations`: only their names. `others`:
    entries of the layer list that are not file systems, such as WebAssembly, attestations and
    signatures; they are neither fetched nor stored."""

    config: Descriptor
    layers: list[Descriptor]
    annotations: frozenset[str] = frozenset()
    others: tuple[Descriptor, ...] = ()


class ImageIndex(msgspec.Struct, frozen=True):
    """An image index: manifests for several platforms."""

    manifests: list[Descriptor]


class ImageConfig(msgspec.Struct, frozen=True, rename="pascal"):
    """The part of an image's configuration that containers use. Hostile input: types are checked,
    values are not. `volumes`: the paths are its keys, its values are null."""

    user: str = ""
    env: list[str] = []
    entrypoint: list[str] = []
    cmd: list[str] = []
    working_dir: str = ""
    labels: dict[str, str] = {}
    stop_signal: str = ""
    volumes: dict[str, None] = {}


class ImageConfiguration(msgspec.Struct, frozen=True):
    """An image's configuration: platform, diff ids of the layers, and how to run it."""

    platform: Platform
    diff_ids: list[str]
    image: ImageConfig


class _RawManifest(msgspec.Struct, rename={"artifact_type": "artifactType"}):
    config: Descriptor
    layers: list[Descriptor] | None = None
    annotations: dict[str, Any] | None = None  # hostile: values of any type
    artifact_type: str | None = None


class _RawRootfs(msgspec.Struct):
    type: str = "layers"
    diff_ids: list[str] | None = None


class _RawConfig(msgspec.Struct):
    rootfs: _RawRootfs
    architecture: str = ""
    os: str = ""
    variant: str | None = None
    config: ImageConfig = ImageConfig()


def parse(data: bytes, media_type: str = "") -> Manifest | ImageIndex:
    """Parse a manifest or an index. `media_type`: the Content-Type it came with, "" for none.

    Raises BadManifest, Artifact, Unsupported.
    """
    document = _document(data, "manifest")
    own = document.get("mediaType", "")
    sent = media_type.partition(";")[0].strip().lower()
    if not isinstance(own, str):
        raise BadManifest("manifest: mediaType is not a string")
    if sent in _GENERIC:
        sent = ""
    # CVE-2021-41190: one digest could mean two images to two programs, of which one follows the
    # type in the document and the other the Content-Type.
    if own and sent and own != sent:
        raise BadManifest(
            f"manifest: its media type is {own[:100]!r}, but it was sent as {sent[:100]!r}"
        )
    kind = own or sent or _kind_by_shape(document)
    if kind.startswith(_SCHEMA_1) or document.get("schemaVersion") == 1:
        raise Unsupported(
            "manifest: Docker's schema 1 is no longer supported; push the image with a newer tool"
        )
    # The same CVE: a document that is a manifest and an index.
    if "layers" in document and "manifests" in document:
        raise BadManifest("manifest: the document has both layers and manifests")
    if kind in INDEXES:
        return _index(document)
    if kind in MANIFESTS:
        return _manifest(document)
    if kind == _ARTIFACT_MANIFEST:
        raise _artifact(document.get("artifactType"))
    raise Unsupported(f"manifest: media type {kind[:100]!r} is not supported")


def encoded(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON with OCI's media type and without annotations, so that images with
    the same configuration and layers have the same digest."""

    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": manifest.config,
        "layers": manifest.layers,
    }
    return msgspec.json.encode(document)


def with_layers(manifest: Manifest, layers: list[Descriptor]) -> Manifest:
    """Return a manifest that names `layers`, with OCI's media types and without annotations.
    `layers` have the content of the layers in `manifest`, but may be compressed in another way."""

    def layer_in_oci(layer: Descriptor) -> Descriptor:
        suffix = next((f"+{f}" for f in ("gzip", "zstd") if layer.media_type.endswith(f)), "")
        return Descriptor(OCI_LAYER + suffix, layer.digest, layer.size)

    config = Descriptor(OCI_CONFIG, manifest.config.digest, manifest.config.size)
    return Manifest(config, [layer_in_oci(layer) for layer in layers])


def media_type(data: bytes) -> str:
    """Return the media type of a manifest or an index: its field `mediaType`, or else the OCI media
    type that its other fields imply. Raises BadManifest."""
    document = _document(data, "manifest")
    return str(document.get("mediaType") or _kind_by_shape(document))


def parse_config(data: bytes) -> ImageConfiguration:
    """Parse an image's configuration, and drop its labels that begin with RESERVED_LABELS. Raises
    BadManifest."""
    document = _without_nulls(_document(data, "image configuration"))
    if isinstance(document.get("config"), dict):
        config = document["config"] = _without_nulls(document["config"])
        if isinstance(config.get("Volumes"), dict):
            config["Volumes"] = dict.fromkeys(config["Volumes"])
    raw: _RawConfig = _typed(document, _RawConfig, "image configuration")
    diff_ids = raw.rootfs.diff_ids or []
    if raw.rootfs.type != "layers" or not all(is_digest(d) for d in diff_ids):
        raise BadManifest("image configuration: rootfs is not a list of sha256 or sha512 diff ids")
    image = raw.config
    lists = (*image.env, *image.entrypoint, *image.cmd, *image.volumes)
    # A NUL ends a text in execve(2) and in paths.
    if any("\0" in text for text in (image.user, image.working_dir, image.stop_signal, *lists)):
        raise BadManifest("image configuration: a text contains a NUL character")
    if len(lists) + len(image.labels) > ENTRIES_LIMIT:
        raise BadManifest(
            "image configuration: variables, arguments, volumes and labels are more than"
            f" {ENTRIES_LIMIT}"
        )
    labels = {k: v for k, v in image.labels.items() if not k.startswith(RESERVED_LABELS)}
    image = msgspec.structs.replace(image, labels=labels)
    return ImageConfiguration(Platform(raw.architecture, raw.os, raw.variant), diff_ids, image)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null: docker writes null for an absent list."""
    return {name: value for name, value in fields.items() if value is not None}


def choose(index: ImageIndex, platform: Platform | None = None) -> Descriptor:
    """Choose the image of the index that suits this machine best. If several suit equally well,
    choose the first of these. Images without a platform come last. With `platform`, choose the
    first image for exactly that platform.

    Raises NotFound, which lists the platforms of the index.
    """
    if platform is None:
        ranked = _ranked(index)
    else:
        host = (processor(platform),)
        ranked = [d for d in index.manifests if d.platform and rank(d.platform, host) == 0]
    if not ranked:
        platforms = sorted(
            {str(d.platform) for d in index.manifests if d.platform and d.platform.os != "unknown"}
        )
        target = platform or _this_machine()
        raise NotFound(f"no image for {target}; available: {', '.join(platforms)[:300] or 'none'}")
    return ranked[0]


def choose_stored(index: ImageIndex, is_here: Callable[[str], bool]) -> Descriptor:
    """Choose the best image of an index among those whose manifest is stored (`is_here`). Prefer
    images for this machine's processor. If none is stored, return the best image for this machine.

    Raises NotFound, which lists the platforms of the index.
    """
    foreign = [
        d for d in index.manifests if d.platform and (d.platform.os or "linux").lower() == "linux"
    ]
    here = (d for d in (*_ranked(index), *foreign) if is_here(d.digest))
    return next(here, None) or choose(index)


def follow(
    target: Descriptor,
    read: Callable[[Descriptor], Manifest | ImageIndex],
    is_here: Callable[[str], bool],
) -> tuple[Descriptor, Manifest]:
    """Return the manifest that `target` leads to, and its descriptor. If `target` is an index,
    `choose_stored` chooses from it and from the indexes nested in it, at most DEPTH_LIMIT levels
    deep. `read` reads and parses a manifest or index. Raises BadManifest, NotFound."""
    for _ in range(DEPTH_LIMIT):
        document = read(target)
        if isinstance(document, Manifest):
            return target, document
        target = choose_stored(document, is_here)
    raise BadManifest(f"indexes are nested more than {DEPTH_LIMIT} deep")


def _ranked(index: ImageIndex) -> list[Descriptor]:
    """Return the images of the index that this machine runs, best first."""
    host = host_processors()
    fitting: list[tuple[int, bool, Descriptor]] = []
    for descriptor in index.manifests:
        place = len(host) if descriptor.platform is None else rank(descriptor.platform, host)
        if place is not None:
            fitting.append((place, descriptor.media_type not in ACCEPTED, descriptor))
    return [descriptor for *_, descriptor in sorted(fitting, key=lambda each: each[:2])]


def foreign_platform(config: ImageConfiguration) -> str:
    """Return a warning if the image's configuration names a processor that this machine does not
    have, else "". A warning is enough, because the user chose the image by name or digest, and the
    node may run it through binfmt_misc(5).

    Raises NotFound if the configuration names a processor and an operating system other than linux.
    """
    platform = config.platform
    # Configurations often name the wrong processor (influxdb, Cilium 1.17, dotnet).
    if not platform.architecture or rank(platform, host_processors()) is not None:
        return ""
    words = f"the image is for {platform}, this machine is {_this_machine()}"
    if (platform.os or "linux").lower() != "linux":
        raise NotFound(words)
    return words


def check_platform(config: ImageConfiguration, platform: Platform) -> None:
    """Raise NotFound if the image's configuration names a platform other than the requested
    `platform`. Called only for an image without an index; in an index `choose` compares the
    platforms."""
    if config.platform.architecture and rank(config.platform, (processor(platform),)) is None:
        raise NotFound(f"no image for {platform}; available: {config.platform}")


def _this_machine() -> str:
    architecture, variant = host_processors()[0]
    return str(Platform(architecture, "linux", variant))


def _index(document: dict[str, Any]) -> ImageIndex:
    index: ImageIndex = _typed(
        {**document, "manifests": document.get("manifests") or []}, ImageIndex, "index"
    )
    if len(index.manifests) > INDEX_ENTRIES_LIMIT:
        raise BadManifest(f"index: more than {INDEX_ENTRIES_LIMIT} entries")
    for number, descriptor in enumerate(index.manifests):
        descriptor.check(f"index: manifests[{number}]")
    return index


def _manifest(document: dict[str, Any]) -> Manifest:
    raw: _RawManifest = _typed(document, _RawManifest, "manifest")
    everything = [layer.plain() for layer in raw.layers or []]
    annotations = frozenset(raw.annotations or ())
    if len(annotations) > ENTRIES_LIMIT:
        raise BadManifest(f"manifest: more than {ENTRIES_LIMIT} annotations")
    if len(everything) > LAYERS_LIMIT:
        raise BadManifest(f"manifest: more than {LAYERS_LIMIT} layers")
    layers = [layer for layer in everything if layer.media_type.startswith(_LAYER_PREFIXES)]
    others = tuple(layer for layer in everything if layer not in layers)
    _refuse_artifact(raw, layers, others)
    raw.config.check("manifest: config")
    if raw.config.size > LIMIT_BYTES:
        raise BadManifest(
            f"manifest: the image configuration has {raw.config.size} bytes; the limit is"
            f" {LIMIT_BYTES}"
        )
    for number, layer in enumerate(everything):
        if layer not in others:
            layer.check(f"manifest: layers[{number}]")
        if layer.media_type.endswith("+encrypted"):
            raise Unsupported(f"manifest: layers[{number}] is encrypted")
    return Manifest(raw.config.plain(), layers, annotations, others)


def _refuse_artifact(
    raw: _RawManifest, layers: list[Descriptor], others: tuple[Descriptor, ...]
) -> None:
    """Raise Artifact unless the manifest describes an image. It describes an artifact in two cases:

    - Its config does not have an image's media type.
    - Its layer list has entries, but none of them is a file system (cosign's signatures, buildkit's
      attestations).

    Source: OCI image specification, "Guidelines for Artifact Usage".
    """
    config = raw.config.media_type
    if config in _IMAGE_CONFIGS and (layers or not others):
        return
    is_empty = config == _EMPTY_CONFIG or config in _IMAGE_CONFIGS
    raise _artifact(raw.artifact_type or (others[0].media_type if is_empty and others else config))


def _artifact(kind: object) -> Artifact:
    return Artifact(
        f"an OCI artifact of type {str(kind or 'unknown')[:100]!r}, not an image:"
        " it has no file system to run or to mount"
    )


def check_layers(manifest: Manifest, config: ImageConfiguration) -> None:
    """Raise BadManifest unless the configuration has as many diff ids as the manifest has
    file-system layers."""
    if len(config.diff_ids) != len(manifest.layers):
        kinds = ", ".join(dict.fromkeys(layer.media_type[:100] for layer in manifest.others))
        beside = f" and {kinds[:300]}" if kinds else ""
        raise BadManifest(
            f"the manifest has {len(manifest.layers)} layers{beside}, but the image"
            f" configuration has {len(config.diff_ids)} diff ids"
        )


def _kind_by_shape(document: dict[str, Any]) -> str:
    if "manifests" in document:
        return OCI_INDEX
    return OCI_MANIFEST if "layers" in document or "config" in document else "nothing"


def _document(data: bytes, what: str) -> dict[str, Any]:
    if len(data) > LIMIT_BYTES:
        raise BadManifest(f"{what}: more than {LIMIT_BYTES} bytes")
    try:
        # Half a surrogate pair cannot be encoded as UTF-8, so no answer could list the image. Go's
        # encoding/json replaces it, too.
        text = _SURROGATES.sub(lambda m: "\ufffd" if m[1] else m[0], data.decode("utf-8"))
        # json alone also takes UTF-16, NaN and Infinity, and the last one of equal keys: another
        # program could read another document.
        value = json.loads(
            text,
            object_pairs_hook=typed.unique_keys,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"{what}: not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise BadManifest(f"{what}: not a JSON object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _typed(document: dict[str, Any], kind: type[Any], what: str) -> Any:
    try:
        return typed.convert(document, kind)
    except msgspec.ValidationError as error:
        raise BadManifest(f"{what}: {str(error)[:300]}") from None
