"""Reads a layer's tar into a tree in memory. The tree has the files that `layers.extract` makes on
disk, and both refuse the same tars.

Names with `..` are refused; links on the way to a name are followed as if the layer's root were
`/`. This module checks the length of names, links and paths; for the unpacker the kernel does this.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from cri_server.images.erofs import xattrs
from cri_server.images.erofs.format import BLOCK
from cri_server.images.erofs.node import ErofsNode, directory
from cri_server.images.erofs.tar_file import TarFile
from cri_server.images.layers import reader, tar_headers
from cri_server.images.layers.inflate import BadLayer, UnpackLimits
from cri_server.images.layers.reader import (
    bad_link,
    checked_members,
    components,
    joined,
    path_error,
)
from cri_server.images.layers.tar_headers import TarMember, quoted
from cri_server.images.layers.walk_budget import DIRECTORY_STEPS, WalkBudget
from pyrunc.errors import ResourceExhausted

NAME_LIMIT_BYTES = 255
_TICK_ENTRIES = 5000


def read_layer(
    tar: TarFile, device: int, limits: UnpackLimits, tick: Callable[[], None] = lambda: None
) -> ErofsNode:
    """Return the root of the layer's tree. `device`: the number of the EROFS device that has the
    data of the layer's files. `tick` is called regularly, and may raise.

    Raises BadLayer, ResourceExhausted.
    """
    layer = _Reader(tar, device, limits, tick)
    try:
        return layer.run()
    except OSError as error:
        raise BadLayer(f"{quoted(layer.entry_name)}: {os.strerror(error.errno or 0)}") from None
    except MemoryError:
        raise ResourceExhausted("not enough memory to index the layer's files") from None


class _TreeCursor:
    """The directory that the resolution of a path has reached: its node, and its path without
    links."""

    def __init__(self, layer: _Reader, make: bool) -> None:
        self._reader = layer
        self._make = make
        # each directory below the root, with its name
        self._above: list[tuple[bytes, ErofsNode]] = []

    @property
    def node(self) -> ErofsNode:
        return self._above[-1][1] if self._above else self._reader.root

    def path_of(self, *name: bytes) -> bytes:
        return b"/".join([*(above for above, _ in self._above), *name])

    def enter(self, name: bytes) -> tuple[int, bytes] | None:
        if len(name) > NAME_LIMIT_BYTES:
            raise path_error(errno.ENAMETOOLONG)
        step = self._reader.step(self, name, self._make)
        if step.children is None:
            return id(step), step.link
        self._above.append((name, step))
        return None

    def leave(self) -> None:
        if self._above:
            self._above.pop()

    def restart(self) -> None:
        self._above.clear()


class _Reader:
    def __init__(
        self, tar: TarFile, device: int, limits: UnpackLimits, tick: Callable[[], None]
    ) -> None:
        self._tar = tar
        self._device = device
        self._limits = limits
        self._tick = tick
        self.root = directory()
        # path as written -> (resolved path, directory)
        self._parents: dict[bytes, tuple[bytes, ErofsNode]] = {}
        # id() of a link's node -> keys of `_parents` whose paths lead over it
        self._through: dict[int, list[bytes]] = {}
        self._budget = WalkBudget()
        self._hidden: set[bytes] = set()  # paths that `.wh.` entries hide
        self._nodes = 1
        self.entry_name = b""

    def run(self) -> ErofsNode:
        make = {
            tar_headers.FILE: self._file,
            tar_headers.DIRECTORY: self._directory,
            tar_headers.SYMLINK: self._symlink,
            tar_headers.HARDLINK: self._hardlink,
            tar_headers.CHARACTER: self._device_node,
            tar_headers.BLOCK_DEVICE: self._device_node,
            tar_headers.FIFO: self._device_node,
            reader.ROOT: self._describe_root,
            reader.HIDDEN: self._hide,
            reader.OPAQUE: self._make_opaque,
        }
        for what, entry, names in checked_members(
            self._tar, self._limits, self._budget, self._tick, _TICK_ENTRIES
        ):
            self.entry_name = entry.name
            make[what](entry, names)
        return self.root

    # ---- one method per kind

    def _file(self, entry: TarMember, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        node = self._described(entry, stat.S_IFREG)
        node.size, node.stored, node.sparse = entry.size, entry.stored, entry.sparse
        # Exact: data in a tar begins at a multiple of 512 bytes, which is the index's block.
        node.device, node.block = self._device, self._tar.position // BLOCK
        if entry.stored:
            tar_headers.skip(self._tar, entry.stored)
        self._put(path, parent, names[-1], node)

    def _directory(self, entry: TarMember, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        assert parent.children is not None
        node = parent.children.get(names[-1])
        if node is None or node.children is None:
            node = self._put(path, parent, names[-1], directory())
        self._describe_directory(node, entry)

    def _describe_directory(self, node: ErofsNode, entry: TarMember) -> None:
        described = self._described(entry, stat.S_IFDIR)
        if node.xattrs:  # a directory described twice has the attributes of both
            node.xattrs.update(described.xattrs)  # in place: copies would take quadratic time
            described.xattrs = node.xattrs
        node.take_attributes(described)
        node.implicit = False

    def _describe_root(self, entry: TarMember, _: list[bytes]) -> None:
        self._describe_directory(self.root, entry)

    def _symlink(self, entry: TarMember, names: list[bytes]) -> None:
        if len(entry.link) > reader.PATH_LIMIT_BYTES:
            raise path_error(errno.ENAMETOOLONG)
        path, parent = self._parent(names)
        node = self._described(entry, stat.S_IFLNK)
        node.mode = stat.S_IFLNK | 0o777
        node.link = entry.link
        self._put(path, parent, names[-1], node)

    def _device_node(self, entry: TarMember, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        node = self._described(entry, reader.NODES[entry.kind])
        node.rdev = (entry.major, entry.minor)
        self._put(path, parent, names[-1], node)

    def _hardlink(self, entry: TarMember, names: list[bytes]) -> None:
        source = components(entry.link)
        source_path, folder = self._parent(source, make=False)
        path, parent = self._parent(names)
        if source_path == path:
            return
        assert folder.children is not None
        node = folder.children.get(source[-1])
        if node is None:
            raise bad_link(entry, reader.ABSENT)
        if node.children is not None or node.is_whiteout:
            raise bad_link(entry, reader.NO_FILE)
        if source_path.startswith(path + b"/"):  # the target is in the directory to be replaced
            raise path_error(errno.ENOENT)
        self._put(path, parent, names[-1], node)

    def _make_opaque(self, _: TarMember, folder: list[bytes]) -> None:
        self._enter(folder)[1].opaque = True

    def _hide(self, _: TarMember, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        assert parent.children is not None
        self._hidden.add(path)
        node = parent.children.get(names[-1])
        if node is None:
            self._put(path, parent, names[-1], ErofsNode(stat.S_IFCHR))
        elif node.children is not None:
            node.opaque = True

    def _described(self, entry: TarMember, kind: int) -> ErofsNode:
        node = ErofsNode(kind | entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        if entry.xattrs:
            attributes = reader.supported_attributes(entry)
            try:
                node.mode, node.xattrs = xattrs.effective_attributes(node.mode, attributes)
            except BadLayer as error:
                raise BadLayer(f"{quoted(entry.name)}: {error.message}") from None
        return node

    # ---- names

    def _put(self, path: bytes, parent: ErofsNode, name: bytes, node: ErofsNode) -> ErofsNode:
        """Add a node under its name, in place of any other, and return it. A directory that
        replaces a whiteout becomes opaque."""
        assert parent.children is not None
        before = parent.children.get(name)
        if before is not None:
            if before.children is not None:
                self._parents.clear()
                self._through.clear()
            elif before.link:
                for written in self._through.pop(id(before), ()):
                    self._parents.pop(written, None)
            if node.children is not None and path in self._hidden:
                node.opaque = True
        else:
            self._nodes += 1
            reader.check_count(self._nodes, self._limits)
        parent.children[name] = node
        return node

    def _parent(self, names: list[bytes], *, make: bool = True) -> tuple[bytes, ErofsNode]:
        """Return the path `names` with the links in its directories resolved, and the node of its
        parent directory. `make`: make missing directories. Otherwise raises BadLayer for a missing
        one."""
        if len(names[-1]) > NAME_LIMIT_BYTES:
            raise path_error(errno.ENAMETOOLONG)
        folder, node = self._enter(names[:-1], make=make)
        return joined(folder, names[-1]), node

    def _enter(self, names: list[bytes], *, make: bool = True) -> tuple[bytes, ErofsNode]:
        written = b"/".join(names)
        parent = self._parents.get(written)
        if parent is None:
            cursor = _TreeCursor(self, make)
            for link in reader.follow(names, cursor, self._budget):
                self._through.setdefault(link, []).append(written)
            parent = self._parents[written] = (cursor.path_of(), cursor.node)
        return parent

    def step(self, cursor: _TreeCursor, name: bytes, make: bool) -> ErofsNode:
        """Return the directory or link `name` of the cursor's directory. `make`: make a missing
        directory. Raises BadLayer, OSError (ENOTDIR)."""
        folder = cursor.node
        assert folder.children is not None
        node = folder.children.get(name)
        if node is None:
            if not make:
                raise BadLayer(
                    f"{quoted(self.entry_name)}: the layer has no {quoted(cursor.path_of(name))}"
                )
            self._budget.charge(DIRECTORY_STEPS)
            return self._put(b"", folder, name, directory())
        if node.children is not None or node.link:
            return node
        if make and node.is_whiteout:
            path = cursor.path_of(name)
            if path in self._hidden:
                return self._put(path, folder, name, directory())
        raise path_error(errno.ENOTDIR)
