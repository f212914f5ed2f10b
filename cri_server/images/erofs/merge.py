"""Layers laid over each other as overlayfs would show them: one tree, without whiteouts and opaque
directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cri_server.images.erofs.node import Node, directory


def merged(layers: Iterable[Node]) -> Node:
    """The tree that the roots of `layers`, bottom first, make together; theirs are not changed.

    A directory looks as in the topmost layer that describes it. (overlayfs takes the topmost layer
    that has it: the unpacked store gives that one the attributes of the one below, which is the
    same.)
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
    """The same layers, bottom first, each only where it is last: the tree that they make together
    is the same, because what a layer does to a name does not depend on what is there. One large
    layer that is named 500 times is laid over once."""
    return list(dict.fromkeys(reversed(chain)))[::-1]


def _lay_over(below: Node, above: Node) -> None:
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
