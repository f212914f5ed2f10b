"""The catalog of images: reads and writes their names in the OCI layout's `index.json`, and lists
the images by id, tag and digest.

`index.json` is authoritative, so that skopeo and umoci see the same images. A name is a descriptor
with an annotation: the full tag in `org.opencontainers.image.ref.name`, or only the repository in
pyrunc's own annotation (for an image that was pulled by digest, or whose tag now names another
image). `names.json` is a copy, which is read when `index.json` is damaged. When both are damaged,
images are recovered, without names, from the manifests among the blobs. An incomplete image is not
listed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from cri_server.images.formats import manifest as manifests
from cri_server.images.formats.digests import digest_from_hex, hex_of, is_digest
from cri_server.images.formats.manifest import Descriptor, ImageConfiguration, ImageIndex, Manifest
from cri_server.images.formats.reference import Reference, is_id
from cri_server.images.model import Image
from cri_server.images.store.blobs import Blobs
from cri_server.images.store.layer_files import LayerFiles
from cri_server.images.store.unpacked_layers import Layers, chain_ids
from pyrunc import atomic_file
from pyrunc.errors import Error, NotFound

log = logging.getLogger(__name__)

REF_NAME = "org.opencontainers.image.ref.name"
REPOSITORY = "org.pyrunc.image.repository"
FORM = "org.pyrunc.image.form"  # MOUNTED, or absent: its layers are unpacked
MOUNTED = "mounted"
_NAMES = "names.json"


class NotUnpacked(NotFound):
    """The image is neither mountable nor completely unpacked. Its layers must be made again, from
    its stored blobs or tars."""


@dataclass(slots=True)
class StorePolicy:
    """Decides in which form images are stored. `erofs`: new images are mounted, not unpacked.
    `mounts`: this kernel can mount images. `keep_blobs`: a mounted image keeps its compressed
    layers beside the tars."""

    erofs: bool = False
    mounts: bool = False
    keep_blobs: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """A name of an image. `repository`: `HOST/PATH`, "" for an image without a name. `tag`: None in
    a name by digest. `target`: the index or manifest that the registry served."""

    repository: str
    tag: str | None
    target: Descriptor

    @property
    def tagged(self) -> str | None:
        return f"{self.repository}:{self.tag}" if self.tag else None

    @property
    def by_digest(self) -> str | None:
        return f"{self.repository}@{self.target.digest}" if self.repository else None

    def __str__(self) -> str:
        return self.tagged or self.by_digest or self.target.digest


@dataclass(frozen=True, slots=True)
class Content:
    """What the store has for one manifest of an image. `chain`: the layers' chain ids, bottom
    first. `blobs`: digest and size of each blob that the image needs. `mounted`: True if the layers
    are stored as tars with an EROFS index, False if they are unpacked."""

    image_id: str
    manifest: Manifest
    config: ImageConfiguration
    chain: list[str]
    blobs: dict[str, int]
    mounted: bool = False

    @property
    def diff_ids(self) -> list[str]:
        """The digest of each layer's uncompressed content, bottom first."""
        return self.config.diff_ids

    @property
    def documents(self) -> set[str]:
        """The digests of the manifest, and of the indexes that lead from the image's name to the
        manifest."""
        return set(self.blobs) - {
            self.manifest.config.digest,
            *(layer.digest for layer in self.manifest.layers),
        }

    @property
    def layer_pairs(self) -> list[tuple[str, str]]:
        """The (blob digest, diff id) of each layer, bottom first."""
        return [
            (layer.digest, d) for layer, d in zip(self.manifest.layers, self.diff_ids, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _State:
    """The images at one moment. `contents`: the content of each name, by the digest of the name's
    target. `images`: by id. `layer_pairs`: the (blob digest, diff id) of each layer of all
    images."""

    names: list[Name] = field(default_factory=list)
    contents: dict[str, Content] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)
    layer_pairs: frozenset[tuple[str, str]] = frozenset()

    def name(self, reference: str) -> Name | None:
        try:
            parsed = Reference.parse(reference)
        except Error:
            return None
        for name in self.names:
            if name.repository != parsed.name:
                continue
            if name.target.digest == parsed.digest if parsed.digest else name.tag == parsed.tag:
                return name
        return None

    def names_of(self, image_id: str) -> list[Name]:
        return [n for n in self.names if self.contents[n.target.digest].image_id == image_id]

    def name_of(self, image_id: str, references: Iterable[str]) -> Name | None:
        names = self.names_of(image_id)
        for reference in references:
            name = self.name(reference)
            if name in names and "@" not in reference:
                return name
            repository = repository_of(reference)
            same = (
                [name] if name in names else [n for n in names if n.repository == repository != ""]
            )
            if same and same[0]:
                return replace(same[0], tag=None)
        return None


class Catalog:
    """Lists all images of a store. The methods that read use only memory; any thread may call them
    at any time, because a change replaces the whole state at once. `add`, `remove`, `convert` and
    `load` write files, for one caller at a time."""

    def __init__(
        self,
        root: Path,
        blobs: Blobs,
        layers: Layers,
        files: LayerFiles,
        policy: StorePolicy,
        pinned: Iterable[str] = (),
    ) -> None:
        self._root = root
        self._blobs = blobs
        self._layers = layers
        self._files = files
        self._policy = policy
        self._pinned = {pin(text) for text in pinned}
        self._state = _State()
        self._publishing = threading.Lock()  # held while the state is replaced
        self._were_mounted: set[str] = set()  # target digests with FORM in the index that was read

    # ---- reading

    @property
    def layer_pairs(self) -> frozenset[tuple[str, str]]:
        """Return the (blob digest, diff id) of each layer of all images."""
        return self._state.layer_pairs

    def images(self) -> list[Image]:
        """Return every image once."""
        return list(self._state.images.values())

    def find(self, reference: str) -> Image | None:
        """Return the image that `reference` names: by id, by a unique prefix of an id, by tag or by
        digest. None if it is absent or `reference` is malformed."""
        state = self._state
        for image_id in (reference, digest_from_hex(reference)):
            if image_id in state.images:
                return state.images[image_id]
        # A text such as `cafe` may be both a name and the prefix of an id: the name comes first.
        if name := state.name(reference):
            return state.images[state.contents[name.target.digest].image_id]
        matches = [
            i for i in state.images.values() if is_id(reference) and id_matches(i.id, reference)
        ]
        return matches[0] if len(matches) == 1 else None

    def name(self, reference: str) -> Name | None:
        """Return the Name that has the repository and the tag or digest of `reference`; None if the
        catalog has no such name."""
        return self._state.name(reference)

    def content(self, image_id: str) -> Content:
        """Return the content of the image's first manifest. (All its manifests have the same
        configuration, diff ids and form.) Raises NotFound."""
        return self.contents(image_id)[0]

    def documents(self, repository: str) -> set[str]:
        """Return the digests of the stored manifests and indexes that this repository has
        served."""
        state = self._state
        names = [name for name in state.names if name.repository == repository]
        return {digest for name in names for digest in state.contents[name.target.digest].documents}

    def content_of(self, name: Name) -> Content:
        """Return the content of the manifest that `name` leads to. Raises NotFound."""
        content = self._state.contents.get(name.target.digest)
        if content is None:
            raise NotFound(f"image {name} was removed")
        return content

    def contents(self, image_id: str, references: Iterable[str] = ()) -> list[Content]:
        """Return the contents of the image's manifests, which may differ in annotations and blobs.
        If `name_of` finds a name for `references`, return only the content of the manifest that
        this name leads to. Raises NotFound."""
        state = self._state
        name = state.name_of(image_id, references)
        if name is not None:
            return [state.contents[name.target.digest]]
        contents = [content for content in state.contents.values() if content.image_id == image_id]
        if not contents:
            raise NotFound(f"no image {image_id}")
        return contents

    def name_of(self, image_id: str, references: Iterable[str]) -> Name | None:
        """Return the name under which to show an image, by the first usable one of `references`;
        None if none is usable. A reference is usable if it names the image, or if the image has a
        name in the reference's repository.

        If the reference is a tag of the image, the returned name has this tag. If the reference has
        a digest, or only its repository fits, the name has no tag.
        """
        return self._state.name_of(image_id, references)

    def is_mounted(self, image_id: str) -> bool:
        """Return whether the image has the mounted form (tars with an EROFS index). If the image is
        not listed, return whether it will get that form. A listed image keeps its form until
        `convert` changes it, because containers use its files."""
        content = next((c for c in self._state.contents.values() if c.image_id == image_id), None)
        return self._policy.erofs if content is None else content.mounted

    def pin(self, references: Iterable[str]) -> None:
        """Pin the images of these references, and unpin all others. Raises InvalidArgument for a
        malformed reference."""
        pinned = {pin(text) for text in references}
        with self._publishing:
            self._pinned = pinned
            self._state = self._listed(self._state.names, self._state.contents)

    def used_blobs(self) -> dict[str, int]:
        """Return digest and size of each blob that images need."""
        return {
            digest: size
            for content in self._state.contents.values()
            for digest, size in content.blobs.items()
        }

    def used_chain_ids(self) -> set[str]:
        """Return the chain ids of the unpacked layers that images need."""
        contents = self._state.contents.values()
        return {
            chain_id for content in contents if not content.mounted for chain_id in content.chain
        }

    def used_indexes(self) -> set[str]:
        """Return the names of the EROFS indexes that images need: for each image in the mounted
        form, the chain id of its top layer."""
        return {content.chain[-1] for content in self.mounted()}

    def mounted(self) -> list[Content]:
        """Return the contents of all images in the mounted form."""
        return [content for content in self._state.contents.values() if content.mounted]

    def used_tars(self) -> set[str]:
        """Return the diff ids of the tars that images need: tars of mounted images, and tars that
        have replaced a compressed blob."""
        return {
            diff_id
            for content in self._state.contents.values()
            for diff_id, layer in zip(content.diff_ids, content.manifest.layers, strict=True)
            if content.mounted or layer.digest not in content.blobs
        }

    # ---- writing

    def load(self) -> list[Name]:
        """Read `index.json`; if it is damaged, restore it from `names.json` or from the blobs. Drop
        each incomplete image with a line in the log.

        Return the names of images whose layers must be made again. These images are not listed
        until the caller has made the layers and called `add`.
        """
        names = self._read_names()
        complete, contents, not_unpacked = [], {}, []
        for name in names:
            try:
                content = self.examine(name.target, name.target.digest in self._were_mounted)
            except NotUnpacked:
                not_unpacked.append(name)
                continue
            except (Error, OSError) as error:  # OSError: the disk cannot read a file of this image
                log.warning("image %s is removed from the store: %s", name, error)
                continue
            complete.append(name)
            contents[name.target.digest] = content
        if names != complete or not self._is_written():
            self._write(complete, contents)
        self._replace(complete, contents)
        return not_unpacked

    def examine(self, target: Descriptor, mounted: bool | None = None) -> Content:
        """Read an image's manifest and configuration, and check that its files are stored. Return
        its content, in the mounted or the unpacked form.

        If the files of both forms are stored, `mounted` chooses the form. If `mounted` is None, a
        listed image keeps its form, and an unlisted image gets the form of new images. Raises
        NotUnpacked when the image is neither mountable nor completely unpacked, and the errors of
        `read`.
        """
        content = self.read(target)
        mountable = self._policy.mounts and self._files.has_image(content.diff_ids, content.chain)
        missing = next((c for c in content.chain if self._layers.get(c) is None), None)
        if mounted is None:
            mounted = self.is_mounted(content.image_id)
        if mountable and (mounted or missing is not None):
            return replace(content, blobs=self._blobs_of_mounted(content), mounted=True)
        if missing is not None:
            raise NotUnpacked(f"layer {missing} is not unpacked")
        return content

    def _blobs_of_mounted(self, content: Content) -> dict[str, int]:
        """Return digest and size of the blobs that the image needs in the mounted form. Unless the
        policy keeps blobs, the layers' blobs are left out, because tars replace them."""
        if self._policy.keep_blobs:
            return content.blobs
        layers = {layer.digest for layer in content.manifest.layers}
        return {digest: size for digest, size in content.blobs.items() if digest not in layers}

    def read(self, target: Descriptor) -> Content:
        """Read manifest and configuration of the image that `target` leads to, and check that each
        layer has a stored blob or tar. Return the content, with `mounted` False. Does not check
        that the layers are unpacked.

        Raises NotFound for a missing blob, and PeerError or Unsupported for a damaged or unusable
        manifest or configuration.
        """
        blobs: dict[str, int] = {}

        def read(descriptor: Descriptor) -> Manifest | ImageIndex:
            data = self._blobs.read(descriptor.digest, manifests.LIMIT_BYTES)
            blobs[descriptor.digest] = len(data)
            return manifests.parse(data, descriptor.media_type)

        _, manifest = manifests.follow(
            target, read, lambda digest: self._blobs.size(digest) is not None
        )
        config_data = self._blobs.read(manifest.config.digest, manifests.LIMIT_BYTES)
        config = manifests.parse_config(config_data)
        chain = chain_ids(config.diff_ids)
        blobs[manifest.config.digest] = len(config_data)
        blobs |= self._layer_blobs(manifest, config)
        return Content(manifest.config.digest, manifest, config, chain, blobs)

    def add(self, names: Iterable[Name]) -> None:
        """List the images of these names, durably. When a tag moves to another image, the old image
        stays listed by its digest.

        Raises the errors of `examine` for an image whose files are not stored, OSError when
        `index.json` cannot be written. The catalog is then unchanged.
        """
        after, contents = self._state.names, dict(self._state.contents)
        for name in names:
            contents[name.target.digest] = self.examine(name.target)
            updated = [_name_after(n, name) for n in after]
            after = list(dict.fromkeys([*filter(None, updated), name]))
        if set(after) != set(self._state.names) or contents != self._state.contents:
            self._write(after, contents)
        self._replace(after, contents)

    def remove(self, names: Iterable[Name]) -> None:
        """Remove these names, durably. An image without a name is no longer listed. Raises OSError;
        the catalog is then unchanged."""
        remaining = self._without(names)
        self._write(remaining, self._state.contents)
        self._replace(remaining, self._state.contents)

    def remove_in_memory(self, names: Iterable[Name]) -> None:
        """Remove these names in memory only. Meant for a full disk: the caller deletes the images'
        content first, and afterwards calls `remove`, which writes `index.json`. After a crash in
        between, `load` drops the incomplete images."""
        self._replace(self._without(names), self._state.contents)

    def _without(self, names: Iterable[Name]) -> list[Name]:
        removed = set(names)
        return [name for name in self._state.names if name not in removed]

    def convert(self, image_id: str, mounted: bool) -> None:
        """Record, durably, the image's new form: the mounted form if `mounted`, else the unpacked
        form. Raises the errors of `examine` if the files of that form are not stored, OSError when
        `index.json` cannot be written. The catalog is then unchanged."""
        contents = dict(self._state.contents)
        for name in self.names_of(image_id):
            contents[name.target.digest] = self.examine(name.target, mounted)
        self._write(self._state.names, contents)
        self._replace(self._state.names, contents)

    def names_of(self, image_id: str) -> list[Name]:
        """Return all names of an image."""
        return self._state.names_of(image_id)

    def _layer_blobs(self, manifest: Manifest, config: ImageConfiguration) -> dict[str, int]:
        """Return digest and size of the layers' stored blobs. Raises NotFound for a layer with
        neither a blob nor a tar."""
        manifests.check_layers(manifest, config)
        sizes = {}
        for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True):
            if self._blobs.size(layer.digest) == layer.size:
                sizes[layer.digest] = layer.size
            elif not self._files.has_tar(diff_id):
                raise NotFound(f"layer blob {layer.digest} is missing or has another size")
        return sizes

    def _replace(self, names: list[Name], contents: dict[str, Content]) -> None:
        """Replace the catalog's state with `names` and the contents of their targets. Elements of
        `contents` to which none of `names` leads are dropped."""
        targets = {name.target.digest for name in names}
        named = {digest: content for digest, content in contents.items() if digest in targets}
        with self._publishing:
            self._state = self._listed(names, named)

    def _listed(self, names: list[Name], contents: dict[str, Content]) -> _State:
        pairs = frozenset(pair for c in contents.values() for pair in c.layer_pairs)
        state = _State(names, contents, {}, pairs)
        images: dict[str, Image] = {}
        for content in contents.values():
            # Manifests of several repositories may lead to one image.
            if content.image_id not in images:
                images[content.image_id] = self._image(content, state.names_of(content.image_id))
        return replace(state, images=images)

    def _image(self, content: Content, names: list[Name]) -> Image:
        tags = sorted({n.tagged for n in names if n.tagged})
        digests = sorted({n.by_digest for n in names if n.by_digest})
        return Image(
            id=content.image_id,
            repo_tags=tags,
            repo_digests=digests,
            size_bytes=sum(content.blobs.values()) + self._layers_size(content),
            user=content.config.image.user,
            pinned=bool(self._pinned & {content.image_id, *tags, *digests}),
        )

    def _layers_size(self, content: Content) -> int:
        if content.mounted:
            return self._files.size(content.diff_ids, content.chain)
        unpacked = [self._layers.get(chain_id) for chain_id in dict.fromkeys(content.chain)]
        return sum(layer.size_bytes for layer in unpacked if layer)

    # ---- the files

    def _write(self, names: list[Name], contents: dict[str, Content]) -> None:
        entries = [_descriptor(name, contents[name.target.digest].mounted) for name in names]
        index = {"schemaVersion": 2, "mediaType": manifests.OCI_INDEX, "manifests": entries}
        data = json.dumps(index, indent=1).encode()
        # index.json comes first, because it is authoritative; names.json may be older by one
        # change.
        atomic_file.write_bytes(str(self._root / "index.json"), data, durable=True)
        try:
            atomic_file.write_json(str(self._root / _NAMES), {"manifests": entries}, durable=True)
        except OSError as error:  # the copy stays outdated, which is harmless
            log.warning("%s could not be written: %s", self._root / _NAMES, error)

    def _is_written(self) -> bool:
        return (self._root / "index.json").exists() and (self._root / _NAMES).exists()

    def _read_names(self) -> list[Name]:
        index = self._root / "index.json"
        if not index.exists() and not (self._root / _NAMES).exists():
            return self._scan()
        for path in (index, self._root / _NAMES):
            try:
                return self._parsed(json.loads(path.read_bytes())["manifests"])
            except (OSError, ValueError, LookupError, TypeError, RecursionError, Error) as error:
                log.warning(
                    "%s is damaged and was renamed: %s: %s", path, type(error).__name__, error
                )
                with suppress(FileNotFoundError):
                    path.rename(f"{path}.damaged-{time.time_ns()}")
        return self._scan()

    def _parsed(self, entries: list[dict[str, Any]]) -> list[Name]:
        names = _without_repeated_tags(_name(entry) for entry in entries)
        forms = [(entry.get("annotations") or {}).get(FORM) for entry in entries]
        self._were_mounted = {
            n.target.digest for n, f in zip(names, forms, strict=True) if f == MOUNTED
        }
        return names

    def _scan(self) -> list[Name]:
        """Return a Name without repository and tag for each complete image among the blobs."""
        images = []
        for digest in self._blobs.digests():
            try:
                size = self._blobs.size(digest) or 0
                if not is_digest(digest) or size > manifests.LIMIT_BYTES:
                    continue
                data = self._blobs.read(digest, manifests.LIMIT_BYTES)
                target = Descriptor(manifests.media_type(data), digest, size)
                self.read(target)
            except (Error, OSError):
                continue
            images.append(Name("", None, target))
        # Indexes are left out, because the scan also finds the manifests that they lead to.
        return [n for n in images if n.target.media_type in manifests.MANIFESTS] or images


def id_matches(image_id: str, text: str) -> bool:
    """Return whether `image_id` begins with `text`, a prefix with or without `sha256:`."""
    return (image_id if ":" in text else hex_of(image_id)).startswith(text)


def repository_of(reference: str) -> str:
    """Return `HOST/PATH` of a reference; "" for an id or a malformed reference."""
    try:
        return "" if is_id(reference) else Reference.parse(reference).name
    except Error:
        return ""


def _name_after(name: Name, new: Name) -> Name | None:
    """Return what `name` becomes when the name `new` is added. If `new` has the same tag for
    another image, `name` loses the tag. If `new` makes `name` superfluous, return None."""
    is_same_target = name.target.digest == new.target.digest
    if name.repository != new.repository:
        return None if is_same_target and new.repository and not name.repository else name
    if name.tag in (None, new.tag) and is_same_target:
        return None
    if new.tag and name.tag == new.tag:
        return Name(name.repository, None, name.target)
    return name


def pin(text: str) -> str:
    """Return the normal form of a reference or id from the configuration's list of pinned images.
    Raises InvalidArgument."""
    if is_id(text):
        return text if ":" in text else digest_from_hex(text)
    return str(Reference.parse(text))


def _descriptor(name: Name, mounted: bool) -> dict[str, Any]:
    annotations = {REF_NAME: name.tagged} if name.tagged else {REPOSITORY: name.repository}
    if mounted:
        annotations[FORM] = MOUNTED
    entry = msgspec.structs.replace(name.target.plain(), annotations=annotations)
    fields: dict[str, Any] = msgspec.to_builtins(entry)
    return fields


def _without_repeated_tags(names: Iterable[Name]) -> list[Name]:
    """Return the names. If several have the same tag, only the first of them keeps it. (Previous
    versions stored two spellings of one name, such as Docker.io/a:1 and docker.io/library/a:1, as
    two names.)"""
    tags: set[str] = set()
    unique = []
    for name in names:
        if name.tagged in tags:
            name = Name(name.repository, None, name.target)
        elif name.tagged:
            tags.add(name.tagged)
        unique.append(name)
    return unique


def _name(entry: dict[str, Any]) -> Name:
    """Parse the descriptor `entry` of index.json to a Name. The repository is "" when another tool,
    such as skopeo, wrote the descriptor without a name, or with a tag alone."""
    target = Descriptor(str(entry["mediaType"]), str(entry["digest"]), int(entry["size"]))
    target.check("index.json")
    annotations = entry.get("annotations") or {}
    if REF_NAME in annotations and "/" in annotations[REF_NAME]:
        reference = Reference.parse(annotations[REF_NAME])
        return Name(reference.name, reference.tag, target)
    return Name(repository_of(str(annotations.get(REPOSITORY, ""))), None, target)
