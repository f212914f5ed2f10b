"""The files of an image in memory, from which an index is written."""

from __future__ import annotations

import stat
from collections.abc import Iterator

NO_XATTRS: dict[bytes, bytes] = {}
Sparse = list[tuple[int, int]]


class ErofsNode:
    """A file of any kind; hard links are one node under several names.

    - `device`: the number of the tar that contains a regular file's data, counted from 1.
    - `block`: the block in that tar at which the data begins.
    - `stored`: the number of the file's bytes that the tar contains.
    - `sparse`: the (offset, length) pieces of the file that these bytes fill; None when the whole
      file is stored.
    - `implicit`: a parent directory that the tar does not describe.
    - `opaque`: a directory that hides the contents of the layers below.
    """

    # A layer may have millions of nodes, and the job that holds them has 768 MiB (`jail`).
    __slots__ = (
        "block", "children", "device", "gid", "implicit", "link", "mode", "mtime_ns", "opaque",
        "rdev", "size", "sparse", "stored", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> None:
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.xattrs = NO_XATTRS  # never changed: nodes share it
        self.children: dict[bytes, ErofsNode] | None = None
        self.size = self.stored = self.device = self.block = 0
        self.sparse: Sparse | None = None
        self.link = b""
        self.rdev = (0, 0)
        self.implicit = self.opaque = False

    @property
    def is_whiteout(self) -> bool:
        """Return whether this is a whiteout in overlayfs' form, a character device 0:0."""
        return self.rdev == (0, 0) and stat.S_ISCHR(self.mode)

    def take_attributes(self, other: ErofsNode) -> None:
        """Copy owner, mode, time and extended attributes from another directory."""
        self.mode = other.mode
        self.uid = other.uid
        self.gid = other.gid
        self.mtime_ns = other.mtime_ns
        self.xattrs = other.xattrs


def directory() -> ErofsNode:
    """Return a new empty directory, owned by root and with mode 0755. It is `implicit` until it
    gets the attributes of a directory in a layer's tar."""
    node = ErofsNode(stat.S_IFDIR | 0o755)
    node.children = {}
    node.implicit = True
    return node


def walk(root: ErofsNode) -> Iterator[ErofsNode]:
    """Yield each node once, directories before their contents."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        for child in (node.children or {}).values():
            if child.children is not None:
                pending.append(child)
            elif id(child) not in seen:
                seen.add(id(child))
                yield child
