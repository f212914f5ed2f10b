"""Huffman decoding of header strings (RFC 7541, appendix B), four bits per step.

The code is canonical: codes of one length are consecutive in the order of their symbols, so the
table of lengths defines them. A step is computed on its first use and cached; there are at most 256
× 16 steps, one for each node and each value of four bits.
"""

from __future__ import annotations

import functools

# fmt: off
LENGTHS = (
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
)
# fmt: on
END_OF_STRING = 256

Step = tuple[int, bytes]  # the node after four bits, and the octets that ended in them


class BadHuffman(Exception):
    """An invalid Huffman code."""


class _CodeTree:
    """The code as a binary tree. A node is a number, 0 the root. `children[node]`: for the bits 0
    and 1, the next node or, at the end of a code, the complement (~) of the symbol."""

    def __init__(self) -> None:
        self.children: list[list[int]] = [[0, 0]]
        code = length = 0
        for symbol in sorted(range(len(LENGTHS)), key=lambda s: (LENGTHS[s], s)):
            code <<= LENGTHS[symbol] - length
            length = LENGTHS[symbol]
            self._plant(symbol, code, length)
            code += 1
        self.steps: dict[int, Step] = {}
        # Where a text may end: after whole symbols, or in at most seven bits of padding, all ones
        # (section 5.2).
        node, self.ends = 0, {0}
        for _ in range(7):
            node = self.children[node][1]
            self.ends.add(node)

    def _plant(self, symbol: int, code: int, length: int) -> None:
        node = 0
        for shift in range(length - 1, 0, -1):
            bit = code >> shift & 1
            if not self.children[node][bit]:
                self.children.append([0, 0])
                self.children[node][bit] = len(self.children) - 1
            node = self.children[node][bit]
        self.children[node][code & 1] = ~symbol

    def step(self, node: int, nibble: int) -> Step:
        """Decode the four bits `nibble` from `node` on. Cache and return the next node and the
        decoded symbols. Raises BadHuffman for the end-of-string symbol."""
        out = bytearray()
        at = node
        for shift in (3, 2, 1, 0):
            at = self.children[at][nibble >> shift & 1]
            if at < 0:
                if ~at == END_OF_STRING:
                    raise BadHuffman("the data contains the end-of-string symbol")
                out.append(~at)
                at = 0
        step = self.steps[node << 4 | nibble] = at, bytes(out)
        return step


_tree = functools.cache(_CodeTree)


def decode(data: bytes) -> bytes:
    """Decode `data`. Raises BadHuffman."""
    tree = _tree()
    steps = tree.steps
    node, out = 0, []
    for octet in data:
        for nibble in (octet >> 4, octet & 15):
            node, text = steps.get(node << 4 | nibble) or tree.step(node, nibble)
            if text:
                out.append(text)
    if node not in tree.ends:
        raise BadHuffman("the padding is not at most seven ones")
    return b"".join(out)
