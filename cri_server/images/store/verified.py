"""Records which blobs were decoded to which layers, so that an image may share a stored layer.

A caller has the right to an image's content if *the image's registry serves the manifest and the
configuration to the caller's credentials*. A registry grants pulls per repository (distribution's
token scope `repository:NAME:pull`), so a registry that serves these two would also serve the
layers. Digests alone prove nothing, since any user may write any digest into a manifest:

- the configuration is fetched with each pull and its digest checked, never taken from the store by
  its digest (the image id, which `kubectl` shows to everyone who may see the pod);
- a manifest is taken from the store only for the repository that has served it before, and only
  when that registry answers a HEAD, with these credentials, that the reference still means it;
- a stored layer (blob, tar or folder) is shared only with a manifest that names both its blob and
  its diff id, and only for a pair that was verified when the blob was decoded. A foreign diff id
  over another blob, or a foreign blob under another diff id, is downloaded and verified like any
  layer.

A HEAD of each layer would prove no more: an attacker's registry answers 200 to all of them. The
remaining capability is the pair of a layer's two digests, 256 bits each: a client that got it from
a registry could have kept the content itself.
"""

from __future__ import annotations

from cri_server.images.store.catalog import Catalog

REMEMBERED_LIMIT = 10_000


class VerifiedLayers:
    """Records, in memory, which blobs were decoded to which diff ids. The layers of listed images
    count as verified without a record, because each was decoded before its image was listed. Use on
    one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._decoded: set[tuple[str, str]] = set()  # layers of images that are not listed yet

    def add(self, blob: str, diff_id: str) -> None:
        """Record that the blob with the digest `blob` was decoded to content with the digest
        `diff_id`."""
        if len(self._decoded) >= REMEMBERED_LIMIT:
            self._decoded.clear()  # at worst these layers are downloaded again
        self._decoded.add((blob, diff_id))

    def has(self, blob: str, diff_id: str) -> bool:
        """Return whether the blob is known to have the content `diff_id`."""
        pair = (blob, diff_id)
        return pair in self._decoded or pair in self._catalog.layer_pairs()
