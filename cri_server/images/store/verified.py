"""Which blobs were decoded to which layers: what lets an image share a layer that is here.

What proves the right to an image's content: *its registry serves the manifest and the
configuration, to this caller's credentials*. A registry grants pulls per repository (distribution's
token scope `repository:NAME:pull`), so what serves these two would serve the layers, too. Names
alone prove nothing, since everybody may write any digest into a manifest of their own:

- the configuration is fetched with each pull and its digest checked, never taken from the store by
  its name (the image id, which `kubectl` shows to everybody who may see the pod);
- a manifest is taken from the store only for the repository that has served it before, and only
  when that registry answers, to these credentials, that the reference means it (HEAD);
- a layer that is here, as blob, tar or folder, is shared only with a manifest that names both its
  blob and its uncompressed digest, and only for a pair that was seen to belong together when the
  blob was decoded. A foreign diff id over another blob, or a foreign blob under another diff id, is
  downloaded and verified like any layer.

A HEAD of each layer would prove no more: the registry of an attacker answers 200 to all of them.
What stays: the pair of a layer's two digests, 256 bits each, is a capability. Those who had it
from a registry could have kept the content itself.
"""

from __future__ import annotations

from cri_server.images.store.catalog import Catalog

REMEMBERED_LIMIT = 10_000


class VerifiedLayers:
    """Pairs of blob digest and diff id. Those of listed images follow from their manifests, so
    no file keeps them: each layer of an image was decoded before the image was listed. Use on
    one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._decoded: set[tuple[str, str]] = set()  # of images that are not listed yet

    def add(self, blob: str, diff_id: str) -> None:
        """The blob was decoded, and its content has this digest."""
        if len(self._decoded) >= REMEMBERED_LIMIT:
            self._decoded.clear()  # they are downloaded once more at worst
        self._decoded.add((blob, diff_id))

    def has(self, blob: str, diff_id: str) -> bool:
        """Whether the blob is known to be this layer."""
        pair = (blob, diff_id)
        return pair in self._decoded or pair in self._catalog.layer_pairs()
