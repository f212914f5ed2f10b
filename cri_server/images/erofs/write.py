"""A tree of files as an EROFS image whose data lies elsewhere: superblock, device table, inodes, directories.

Pure: the tree in, bytes out. Regular files are one chunk on the device that their tar is, so the tars are used as they are. Only
sparse files have their data here, because a tar stores it without the holes and at no multiple of a block.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cri_server.images.erofs import format as erofs
from cri_server.images.erofs.node import Node, walk
from cri_server.images.inflate import BadLayer
from pyrunc.errors import ResourceExhausted

SPARSE_LIMIT_BYTES = 1 << 40  # of all sparse files, holes included: blocks are numbered with 32 bits
_DIRECTORY = 2
_DOT, _DOTDOT = b".", b".."
# Of the device table, which follows the superblock.
_FIRST_SLOT = (erofs.SUPERBLOCK_OFFSET + erofs.SUPERBLOCK.size) // erofs.DEVICE_SLOT.size


@dataclass(frozen=True, slots=True)
class Device:
    """A tar: what it is called (64 bytes at most) and how long it is."""

    tag: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SparseFile:
    """Data to be copied: the `pieces` (offset, length) of a file that begins at `offset` in the index come one after the other
    on `device`, from `source` on."""

    offset: int
    pieces: list[tuple[int, int]]
    device: int
    source: int


@dataclass(slots=True)
class Index:
    """The image's metadata, which begins at offset 0, and what else is to be in its file. `size_bytes` of the whole file."""

    content: bytearray
    size_bytes: int
    inodes: int
    sparse: list[SparseFile] = field(default_factory=list)

    def put_devices(self, devices: Sequence[Device]) -> None:
        """Fill the device table, which has room for as many as `index` was told. An index is not whole before."""
        for number, device in enumerate(devices, _FIRST_SLOT):
            erofs.DEVICE_SLOT.pack_into(
                self.content,
                number * erofs.DEVICE_SLOT.size,
                device.tag,
                _blocks(device.size_bytes),
                0,
            )


@dataclass(slots=True)
class _Inode:
    """Where a node goes. `place`: of the inode after meta_blkaddr; `data`: its blocks, counted from the first one after the inodes."""

    node: Node
    number: int
    place: int = 0
    data: int = 0
    layout: int = erofs.FLAT_PLAIN
    links: int = 0
    size: int = 0
    xattrs: bytes = b""


def index(root: Node, devices: int, uuid: bytes) -> Index:
    """The image of the tree, whose files lie on so many devices, which are described last; `uuid` has 16 bytes. Raises BadLayer,
    ResourceExhausted for what the format cannot say."""
    return _Writer(devices, uuid).write(root)


class _Writer:
    def __init__(self, devices: int, uuid: bytes) -> None:
        self._devices, self._uuid = devices, uuid
        self._inodes: dict[int, _Inode] = {}  # by id() of the node
        self._directories: list[tuple[_Inode, list[list[tuple[bytes, _Inode]]]]] = []
        self._meta = _blocks((_FIRST_SLOT + devices) * erofs.DEVICE_SLOT.size)

    def write(self, root: Node) -> Index:
        for node in walk(root):
            self._inodes[id(node)] = _Inode(node, len(self._inodes) + 1)
        self._list_directories(root)
        end, data_blocks = self._lay_out()
        data = self._meta + _blocks(end)
        result = Index(bytearray((data + data_blocks) * erofs.BLOCK), 0, len(self._inodes))
        sparse = self._sparse_files(result, data + data_blocks)
        for inode in self._inodes.values():
            self._put_inode(result.content, inode, data, sparse)
        for here, blocks in self._directories:
            _put_directory(result.content, (data + here.data) * erofs.BLOCK, blocks)
        self._put_superblock(result)
        return result

    def _list_directories(self, root: Node) -> None:
        """Count the links, and sort each directory's names into blocks."""
        inodes = self._inodes
        pending = [(inodes[id(root)], inodes[id(root)])]
        while pending:
            here, above = pending.pop()
            here.links += 2
            entries = [(_DOT, here), (_DOTDOT, above)]
            for name, child in (here.node.children or {}).items():
                inode = inodes[id(child)]
                entries.append((name, inode))
                if child.children is None:
                    inode.links += 1
                else:
                    here.links += 1
                    pending.append((inode, here))
            entries.sort(key=_name)
            blocks, here.size = _split(entries)
            self._directories.append((here, blocks))

    def _lay_out(self) -> tuple[int, int]:
        """Give every inode its place, in the order of the tree; where the last one ends, and how many blocks of data follow."""
        at = data = 0
        for inode in self._inodes.values():
            node = inode.node
            if node.xattrs:
                inode.xattrs = _xattrs(node)
            length = erofs.INODE.size + len(inode.xattrs)
            if node.children is not None:
                inode.data, data = data, data + _blocks(inode.size)
            elif stat.S_ISREG(node.mode):
                inode.size = node.size
                if node.size:
                    inode.layout = erofs.CHUNK_BASED
                    length += -length % erofs.CHUNK_INDEX.size + erofs.CHUNK_INDEX.size
            elif node.link:
                inode.size = len(node.link)
                tail = length + inode.size
                if tail <= erofs.BLOCK:
                    inode.layout, length = erofs.FLAT_INLINE, tail
                    if at % erofs.BLOCK + tail > erofs.BLOCK:  # a tail lies in one block
                        at += -at % erofs.BLOCK
                else:
                    inode.data, data = data, data + _blocks(inode.size)
            inode.place = at
            at += length + -length % erofs.NID_UNIT
        return at, data

    def _sparse_files(self, result: Index, end: int) -> dict[int, int]:
        """Where the sparse files' data begins, by inode number; they lie after everything else, with holes as they have."""
        places = {}
        first = end
        for inode in self._inodes.values():
            node = inode.node
            if node.sparse is not None and node.size:
                places[inode.number] = end
                result.sparse.append(
                    SparseFile(end * erofs.BLOCK, node.sparse, node.device, node.block * erofs.BLOCK)
                )
                end += _blocks(node.size)
                if (end - first) * erofs.BLOCK > SPARSE_LIMIT_BYTES:
                    raise ResourceExhausted(f"sparse files of more than {SPARSE_LIMIT_BYTES} bytes")
        result.size_bytes = end * erofs.BLOCK
        return places

    def _put_inode(self, content: bytearray, inode: _Inode, data: int, sparse: dict[int, int]) -> None:
        node, place = inode.node, self._meta * erofs.BLOCK + inode.place
        after = place + erofs.INODE.size + len(inode.xattrs)
        union = 0
        if inode.layout == erofs.CHUNK_BASED:
            bits = _chunk_bits(node.size)
            union = bits | erofs.CHUNK_INDEXES
            block = sparse.get(inode.number)
            device, block = (node.device, node.block) if block is None else (0, block)
            after += -after % erofs.CHUNK_INDEX.size
            erofs.CHUNK_INDEX.pack_into(content, after, 0, device, block)
        elif inode.layout == erofs.FLAT_INLINE:
            union = erofs.NO_BLOCK
            content[after : after + len(node.link)] = node.link
        elif inode.size:
            union = data + inode.data
            if node.link:
                start = union * erofs.BLOCK
                content[start : start + len(node.link)] = node.link
        elif stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
            union = erofs.encoded_device(*node.rdev)
        seconds, nanoseconds = divmod(node.mtime_ns, 1_000_000_000)
        count = (len(inode.xattrs) - erofs.XATTR_HEADER.size) // 4 + 1 if inode.xattrs else 0
        erofs.INODE.pack_into(
            content, place,
            erofs.i_format(inode.layout), count, node.mode, 0, inode.size, union, inode.number, node.uid, node.gid,
            seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, inode.links,
        )  # fmt: skip
        if inode.xattrs:
            place += erofs.INODE.size
            content[place : place + len(inode.xattrs)] = inode.xattrs

    def _put_superblock(self, result: Index) -> None:
        blocks = result.size_bytes // erofs.BLOCK
        incompatible = erofs.INCOMPAT_CHUNKED_FILE | (erofs.INCOMPAT_DEVICE_TABLE if self._devices else 0)
        erofs.SUPERBLOCK.pack_into(
            result.content, erofs.SUPERBLOCK_OFFSET,
            erofs.MAGIC, 0, erofs.COMPAT_MTIME, erofs.BLOCK_BITS, 0, 0, result.inodes, 0, 0, blocks,
            self._meta, 0, self._uuid, b"", incompatible, 0, self._devices,
            _FIRST_SLOT if self._devices else 0, 0, 0, 0, 0, 0,
        )  # fmt: skip


def _blocks(size: int) -> int:
    return -(-size // erofs.BLOCK)


def _name(entry: tuple[bytes, _Inode]) -> bytes:
    return entry[0]


def _chunk_bits(size: int) -> int:
    """The power of two of blocks that a file of one chunk needs."""
    return (_blocks(size) - 1).bit_length()


def _split(entries: list[tuple[bytes, _Inode]]) -> tuple[list[list[tuple[bytes, _Inode]]], int]:
    """Sorted entries by block, and the directory's size: whole blocks, and what the last one uses."""
    blocks: list[list[tuple[bytes, _Inode]]] = []
    used = erofs.BLOCK
    for entry in entries:
        length = erofs.DIRENT.size + len(entry[0])
        if used + length > erofs.BLOCK:
            blocks.append([])
            used = 0
        used += length
        blocks[-1].append(entry)
    return blocks, (len(blocks) - 1) * erofs.BLOCK + used


def _put_directory(content: bytearray, at: int, blocks: list[list[tuple[bytes, _Inode]]]) -> None:
    for block in blocks:
        names = len(block) * erofs.DIRENT.size
        for number, (name, inode) in enumerate(block):
            kind = _DIRECTORY if inode.node.children is not None else _file_type(inode.node)
            erofs.DIRENT.pack_into(
                content,
                at + number * erofs.DIRENT.size,
                inode.place >> erofs.NID_BITS,
                names,
                kind,
                0,
            )
            content[at + names : at + names + len(name)] = name
            names += len(name)
        at += erofs.BLOCK


def _file_type(node: Node) -> int:
    return erofs.FILE_TYPES[stat.S_IFMT(node.mode)]


def _xattrs(node: Node) -> bytes:
    """The attributes that follow an inode; names in order, so that the same tree gives the same bytes."""
    content = bytearray(erofs.XATTR_HEADER.pack(0, 0))
    for name, value in sorted(node.xattrs.items()):
        prefix, number = next((p, n) for p, n in erofs.XATTR_PREFIXES.items() if name.startswith(p))
        rest = name[len(prefix) :]
        content += erofs.XATTR_ENTRY.pack(len(rest), number, len(value)) + rest + value
        content += bytes(-len(content) % 4)
    if (len(content) - erofs.XATTR_HEADER.size) // 4 >= erofs.XATTR_COUNT_MAX:
        raise BadLayer(f"attributes of {len(content)} bytes of one file")
    return bytes(content)


def iterate_pieces(file: SparseFile) -> Iterator[tuple[int, int, int]]:
    """(offset in the index, offset on the device, length) of each piece of a sparse file."""
    source = file.source
    for offset, length in file.pieces:
        yield file.offset + offset, source, length
        source += length
