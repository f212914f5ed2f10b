"""Merges layers into one tree as overlayfs would show them. The tree has no whiteouts or opaque
directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cri_server.images.erofs.node import ErofsNode, directory


def merged(layers: Iterable[ErofsNode]) -> ErofsNode:
    """Return the root of the tree that all layers show together. `layers`: the layers' roots,
    bottom first; they stay unchanged.

    A directory gets the attributes of the topmost layer that describes it, as in an unpacked image.
    """
    root = directory()
    for layer in layers:
        if layer.opaque:
            root = directory()
        if not layer.implicit:
            root.take_attributes(layer)
        _lay_over(root, layer)
    return root


def without_repetitions(chain: Sequence[int]) -> list[int]:
    """Return the layer numbers of `chain`, bottom first, each only at its topmost position. The
    merged tree stays the same, and a layer that an image names 500 times is merged once."""
    return list(dict.fromkeys(reversed(chain)))[::-1]


def _lay_over(below: ErofsNode, above: ErofsNode) -> None:
    pending = [(below, above)]
    while pending:
        target, source = pending.pop()
        assert target.children is not None and source.children is not None
        for name, node in source.children.items():
            if node.children is None:
                if node.is_whiteout:
                    target.children.pop(name, None)
                else:
                    target.children[name] = node
                continue
            below_node = target.children.get(name)
            if below_node is None or below_node.children is None or node.opaque:
                below_node = target.children[name] = directory()
            if not node.implicit:
                below_node.take_attributes(node)
            pending.append((below_node, node))
