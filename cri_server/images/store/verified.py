"""Remembers which blobs were decoded to which layers, so that an image may share a stored layer.

A pull may use stored content only if the registry serves the image's manifest and configuration to
the pull's credentials. A registry grants pulls per repository (distribution's token scope
`repository:NAME:pull`), so it would then also serve the layers. Digests alone prove nothing,
because any user may write any digest into a manifest:

- The configuration is fetched with each pull and its digest checked. It is never taken from the
  store by its digest, because the digest is the image id, and `kubectl` shows this id to everyone
  who may see the pod.
- A manifest is taken from the store only for the repository that has served it before, and only if
  a HEAD with these credentials shows that the reference still means this manifest.
- A stored layer (blob, tar or folder) is shared only with a manifest that names both its blob and
  its diff id, and only if that blob was decoded to that diff id on this node. Any other pair of
  digests is downloaded and verified.

A HEAD of each layer would prove no more, because an attacker's registry can answer each with 200. A
client that knows both digests of a layer must have got them from a registry that served the content
to this client as well.
"""

from __future__ import annotations

from cri_server.images.store.catalog import Catalog

REMEMBERED_LIMIT = 10_000


class VerifiedLayers:
    """Remembers, in memory, which blobs were decoded to which diff ids. The layers of listed images
    count as verified without an entry, because each was decoded before its image was listed. Use on
    one event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._decoded: set[tuple[str, str]] = set()  # layers of images that are not listed yet

    def add(self, blob: str, diff_id: str) -> None:
        """Remember that the blob with the digest `blob` was decoded to content with the digest
        `diff_id`."""
        if len(self._decoded) >= REMEMBERED_LIMIT:
            self._decoded.clear()  # at worst these layers are downloaded again
        self._decoded.add((blob, diff_id))

    def has(self, blob: str, diff_id: str) -> bool:
        """Return whether the blob is known to have the content `diff_id`."""
        pair = (blob, diff_id)
        return pair in self._decoded or pair in self._catalog.layer_pairs
