"""A layer's tar as a tree in memory: the same files that `images.extract` makes of it, and the same tars refused.

Names with `..` are refused; links on the way to a name are followed as if the layer's root were `/`. What the kernel would say
about a name, a link or a path that is too long is said here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from cri_server.images import tar_headers
from cri_server.images.erofs import xattrs
from cri_server.images.erofs.format import BLOCK
from cri_server.images.erofs.node import Node, directory
from cri_server.images.erofs.tar_file import TarFile
from cri_server.images.extract import (
    AUFS,
    LINKS_AT_MOST,
    MAJOR_LIMIT,
    MINOR_LIMIT,
    OPAQUE,
    PATH_LIMIT_BYTES,
    STEPS_AT_MOST,
    WHITEOUT,
    components,
    is_root_link,
    is_wanted,
)
from cri_server.images.inflate import BadLayer, Limits
from cri_server.images.tar_headers import Entry, members, shown
from cri_server.images.walk_budget import DIRECTORY_STEPS, WalkBudget
from pyrunc.errors import ResourceExhausted

NAME_LIMIT_BYTES = 255
_TICK_ENTRIES = 5000
_KINDS = {
    tar_headers.CHARACTER: stat.S_IFCHR,
    tar_headers.BLOCK_DEVICE: stat.S_IFBLK,
    tar_headers.FIFO: stat.S_IFIFO,
}


def read_layer(tar: TarFile, device: int, limits: Limits, tick: Callable[[], None] = lambda: None) -> Node:
    """The root of the layer's tree, whose files' data is on device number `device`. `tick` is called now and then, and may raise.

    Raises BadLayer, ResourceExhausted.
    """
    reader = _Reader(tar, device, limits, tick)
    try:
        return reader.run()
    except OSError as error:
        raise BadLayer(f"{shown(reader.now)}: {os.strerror(error.errno or 0)}") from None
    except MemoryError:
        raise ResourceExhausted("the layer has more files than there is memory to index them") from None


class _Reader:
    def __init__(self, tar: TarFile, device: int, limits: Limits, tick: Callable[[], None]) -> None:
        self._tar, self._device, self._limits, self._tick = tar, device, limits, tick
        self._root = directory()
        self._parents: dict[bytes, tuple[bytes, Node]] = {}  # as written -> (resolved, directory)
        self._through: dict[
            int, list[bytes]
        ] = {}  # id() of a link's node -> those of `_parents` that lead over it
        self._budget = WalkBudget()
        self._hidden: set[bytes] = set()  # what `.wh.` entries named
        self._nodes = 1
        self.now = b""

    def run(self) -> Node:
        make = {
            tar_headers.FILE: self._file,
            tar_headers.DIRECTORY: self._directory,
            tar_headers.SYMLINK: self._symlink,
            tar_headers.HARDLINK: self._hardlink,
            tar_headers.CHARACTER: self._device_node,
            tar_headers.BLOCK_DEVICE: self._device_node,
            tar_headers.FIFO: self._device_node,
        }
        for entries, entry in enumerate(members(self._tar), 1):
            self.now = entry.name
            self._budget.entries = entries
            self._check(entries)
            if entries % _TICK_ENTRIES == 0:
                self._tick()
            names = components(entry.name)
            if WHITEOUT in entry.name and any(name.startswith(WHITEOUT) for name in names):
                self._whiteout(entry, names)
            elif names:
                make[entry.kind](entry, names)
            elif entry.kind == tar_headers.DIRECTORY:
                self._describe_directory(self._root, entry)
            elif not is_root_link(entry):
                raise BadLayer(f"{shown(entry.name)}: the root must be a directory")
        return self._root

    def _check(self, count: int) -> None:
        if count > self._limits.entries:
            raise ResourceExhausted(f"the layer has more than {self._limits.entries} entries")

    # ---- one method per kind

    def _file(self, entry: Entry, names: list[bytes]) -> None:
        if entry.size > self._limits.size_bytes:
            raise ResourceExhausted(
                f"{shown(entry.name)}: a file of {entry.size} bytes: {self._limits.reason}"
            )
        path, parent = self._parent(names)
        node = self._described(entry, stat.S_IFREG)
        node.size, node.stored, node.sparse = entry.size, entry.stored, entry.sparse
        node.device, node.block = self._device, self._tar.position // BLOCK
        if entry.stored:
            tar_headers.skip(self._tar, entry.stored)
        self._put(path, parent, names[-1], node)

    def _directory(self, entry: Entry, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        assert parent.children is not None
        found = parent.children.get(names[-1])
        if found is None or found.children is None:
            found = self._put(path, parent, names[-1], directory())
        self._describe_directory(found, entry)

    def _describe_directory(self, node: Node, entry: Entry) -> None:
        described = self._described(entry, stat.S_IFDIR)
        if node.xattrs:  # described twice, it has the attributes of both
            node.xattrs.update(described.xattrs)  # in place: copies would take quadratic time
            described.xattrs = node.xattrs
        node.take_attributes(described)
        node.implicit = False

    def _symlink(self, entry: Entry, names: list[bytes]) -> None:
        if not entry.link:
            raise BadLayer(f"{shown(entry.name)}: a symbolic link to nothing")
        if len(entry.link) > PATH_LIMIT_BYTES:
            raise OSError(errno.ENAMETOOLONG, "link")
        path, parent = self._parent(names)
        node = self._described(entry, stat.S_IFLNK)
        node.mode = stat.S_IFLNK | 0o777
        node.link = entry.link
        self._put(path, parent, names[-1], node)

    def _device_node(self, entry: Entry, names: list[bytes]) -> None:
        if entry.major >= MAJOR_LIMIT or entry.minor >= MINOR_LIMIT:
            raise BadLayer(f"{shown(entry.name)}: device number {entry.major}:{entry.minor} is out of range")
        path, parent = self._parent(names)
        node = self._described(entry, _KINDS[entry.kind])
        node.rdev = (entry.major, entry.minor)
        self._put(path, parent, names[-1], node)

    def _hardlink(self, entry: Entry, names: list[bytes]) -> None:
        link_names = components(entry.link)
        if not link_names or any(name.startswith(WHITEOUT) for name in link_names):
            raise BadLayer(f"{shown(entry.name)}: a hard link to {shown(entry.link)}")
        source_path, source = self._parent(link_names, make=False)
        path, parent = self._parent(names)
        if source_path == path:
            return
        assert source.children is not None
        node = source.children.get(link_names[-1])
        if node is None:
            raise BadLayer(
                f"{shown(entry.name)}: a hard link to {shown(entry.link)}, which the layer does not have"
            )
        if node.children is not None or node.is_whiteout:
            raise BadLayer(f"{shown(entry.name)}: a hard link to {shown(entry.link)}, which is no file")
        if source_path.startswith(path + b"/"):  # the directory that would give way holds it
            raise OSError(errno.ENOENT, "link")
        self._put(path, parent, names[-1], node)

    def _whiteout(self, entry: Entry, names: list[bytes]) -> None:
        """As `images.extract` has it: in overlayfs' form, what this layer has itself stays."""
        if entry.kind == tar_headers.FILE:
            tar_headers.skip(self._tar, entry.stored)
        if any(name.startswith(AUFS) for name in names[:-1]):
            return
        if any(name.startswith(WHITEOUT) for name in names[:-1]):
            raise BadLayer(f"{shown(entry.name)}: a whiteout cannot hold anything")
        hidden = names[-1].removeprefix(WHITEOUT)
        if names[-1] == OPAQUE:
            self._enter(names[:-1])[1].opaque = True
        elif names[-1].startswith(AUFS):
            return
        elif hidden in (b"", b".", b".."):
            raise BadLayer(f"{shown(entry.name)}: a whiteout of nothing")
        else:
            self._hide([*names[:-1], hidden])

    def _hide(self, names: list[bytes]) -> None:
        path, parent = self._parent(names)
        assert parent.children is not None
        self._hidden.add(path)
        found = parent.children.get(names[-1])
        if found is None:
            self._put(path, parent, names[-1], Node(stat.S_IFCHR))
        elif found.children is not None:
            found.opaque = True

    def _described(self, entry: Entry, kind: int) -> Node:
        node = Node(kind | entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        if entry.xattrs:
            if any(b"\0" in name for name in entry.xattrs):
                raise BadLayer(f"{shown(entry.name)}: an attribute whose name has a NUL byte")
            wanted = {name: value for name, value in entry.xattrs.items() if is_wanted(name)}
            try:
                node.mode, node.xattrs = xattrs.settle(node.mode, wanted)
            except BadLayer as error:
                raise BadLayer(f"{shown(entry.name)}: {error.message}") from None
        return node

    # ---- names

    def _put(self, path: bytes, parent: Node, name: bytes, node: Node) -> Node:
        """What has that name already gives way. A directory where a whiteout is or was is opaque."""
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
            self._check(self._nodes)
        parent.children[name] = node
        return node

    def _parent(self, names: list[bytes], *, make: bool = True) -> tuple[bytes, Node]:
        """The resolved path of the last name, and the directory that it is in."""
        if len(names[-1]) > NAME_LIMIT_BYTES:
            raise OSError(errno.ENAMETOOLONG, "name")
        folder, node = self._enter(names[:-1], make=make)
        path = b"/".join((folder, names[-1])) if folder else names[-1]
        if len(path) > PATH_LIMIT_BYTES:
            raise OSError(errno.ENAMETOOLONG, "path")
        return path, node

    def _enter(self, names: list[bytes], *, make: bool = True) -> tuple[bytes, Node]:
        written = b"/".join(names)
        found = self._parents.get(written)
        if found is None:
            path, node, links = self._walk(names, make)
            for link in links:
                self._through.setdefault(id(link), []).append(written)
            found = self._parents[written] = (path, node)
        return found

    def _walk(self, names: list[bytes], make: bool) -> tuple[bytes, Node, list[Node]]:
        """The directory's path without links, the directory, and the links on the way to it."""
        pending, links, steps = names[::-1], list[Node](), 0
        way: list[tuple[bytes, Node]] = []  # each directory below the root, with its name
        while pending:
            name = pending.pop()
            if name in (b"", b"."):
                continue
            steps += 1
            if steps > STEPS_AT_MOST:
                raise OSError(errno.ELOOP, "steps")
            if name == b"..":  # only links have it
                if way:
                    way.pop()
                continue
            if len(name) > NAME_LIMIT_BYTES:
                raise OSError(errno.ENAMETOOLONG, "name")
            found = self._step(way, name, make)
            if found.children is not None:
                way.append((name, found))
                continue
            links.append(found)
            if len(links) > LINKS_AT_MOST:
                raise OSError(errno.ELOOP, "link")
            if found.link.startswith(b"/"):
                way = []
            pending.extend(found.link.split(b"/")[::-1])
        self._budget.charge(steps)
        return b"/".join(name for name, _ in way), way[-1][1] if way else self._root, links

    def _step(self, way: list[tuple[bytes, Node]], name: bytes, make: bool) -> Node:
        """The directory or link `name`; a missing directory is made. Raises BadLayer, OSError (ENOTDIR)."""
        folder = way[-1][1] if way else self._root
        assert folder.children is not None
        found = folder.children.get(name)
        if found is None:
            if not make:
                missing = b"/".join([*(part for part, _ in way), name])
                raise BadLayer(f"{shown(self.now)}: the layer has no {shown(missing)}")
            self._budget.charge(DIRECTORY_STEPS)
            return self._put(b"", folder, name, directory())
        if found.children is not None or found.link:
            return found
        if make and found.is_whiteout:
            path = b"/".join([*(part for part, _ in way), name])
            if path in self._hidden:
                return self._put(path, folder, name, directory())
        raise OSError(errno.ENOTDIR, "parent")
