"""Encodes a tree of files as an EROFS image whose data lies in other files: superblock, device
table, inodes, directories. No I/O.

Each layer's tar is a device, and a regular file is one chunk on it, so tars are used as they are.
Only the data of sparse files is copied into the index, because a tar stores this data without the
holes and at offsets that are not multiples of a block. Chunks without data are holes, also for
lseek(2) with SEEK_DATA, so that cp and the like can skip them.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from cri_server.images.erofs import format as erofs
from cri_server.images.erofs.node import ErofsNode, walk
from cri_server.images.layers.inflate import BadLayer
from pyrunc.errors import ResourceExhausted

SPARSE_LIMIT_BYTES = 1 << 40  # of the chunks of all sparse files: blocks are numbered with 32 bits
# The number of chunks of all sparse files: their lists take 16 MiB of the index. Beyond this number
# chunks are larger, and smaller holes are filled.
CHUNKS_LIMIT = 1 << 21
_DOT, _DOTDOT = b".", b".."
_HOLE = erofs.CHUNK_INDEX.pack(0, 0, erofs.NO_BLOCK)
_PAGE_BITS = 3  # of 4 KiB: Linux reads whole pages
# The first slot of the device table, which follows the superblock.
_FIRST_SLOT = (erofs.SUPERBLOCK_OFFSET + erofs.SUPERBLOCK.size) // erofs.DEVICE_SLOT.size


@dataclass(frozen=True, slots=True)
class SparseFile:
    """A sparse file's data, which must be copied into the index. `pieces`: where the data goes, as
    (offset in the index, length). On `device` the pieces lie one after the other, from the offset
    `source` on."""

    pieces: list[tuple[int, int]]
    device: int
    source: int


@dataclass(slots=True)
class EncodedIndex:
    """The encoded EROFS index of an image. `content`: the metadata, with which the file begins.
    `sparse`: the data of sparse files, which must be copied into the file after the metadata.
    `size_bytes`: the size of the whole file."""

    content: bytearray
    size_bytes: int
    inodes: int
    sparse: list[SparseFile] = field(default_factory=list)

    def put_devices(self, devices: Sequence[tuple[bytes, int]]) -> None:
        """Fill the device table, for which `IndexWriter` has reserved the space. Without this table
        the index cannot be mounted. `devices`: each layer's tar, as its name in the index (at most
        64 bytes) and its size in bytes."""
        for number, (tag, size_bytes) in enumerate(devices, _FIRST_SLOT):
            erofs.DEVICE_SLOT.pack_into(
                self.content, number * erofs.DEVICE_SLOT.size, tag, _blocks(size_bytes), 0
            )


@dataclass(slots=True)
class _Inode:
    """The inode of a node. `place`: its offset from meta_blkaddr; `data`: the first block of its
    data, counted from the end of the inodes."""

    node: ErofsNode
    number: int
    place: int = 0
    data: int = 0
    layout: int = erofs.FLAT_PLAIN
    links: int = 0
    size: int = 0
    chunks: _Chunks | None = None
    xattrs: bytes = b""


class _Chunks:
    """The chunks of a sparse file, of 2^`bits` blocks each. `with_data`: the numbers of the chunks
    that contain data; only their data is in the index, one chunk after the other."""

    def __init__(self, node: ErofsNode, limit: int) -> None:
        """`limit`: the highest number of chunks that the file may have. Chunks are made larger if
        it would have more."""
        self._pieces = [piece for piece in node.sparse or () if piece[1]]
        self.bits = _sparse_chunk_bits(node.size, len(self._pieces))
        while self.bits < _chunk_bits(node.size) and _ceil(node.size, self._bytes) > limit:
            self.bits += 1
        self.count = _ceil(node.size, self._bytes)
        self.with_data = self._find()
        # The last chunk ends with the file.
        end = node.size if self.with_data[-1:] == [self.count - 1] else self.count * self._bytes
        self.blocks = _blocks(len(self.with_data) * self._bytes - (self.count * self._bytes - end))

    @property
    def _bytes(self) -> int:
        return erofs.BLOCK << self.bits

    def _find(self) -> list[int]:
        chunks: list[int] = []
        for offset, length in self._pieces:
            first, last = offset // self._bytes, (offset + length - 1) // self._bytes
            if chunks and chunks[-1] >= first:
                first = chunks[-1] + 1
            chunks.extend(range(first, last + 1))
        return chunks

    def places(self, start: int) -> list[tuple[int, int]]:
        """Return where each piece of the file's data lies in the index, as (offset, length) in
        bytes. `start`: the offset in the index at which the file's data begins."""
        places, rank = [], -1
        remaining = iter(self.with_data)
        chunk = -1
        for offset, length in self._pieces:
            while chunk < offset // self._bytes:
                chunk, rank = next(remaining), rank + 1
            places.append((start + rank * self._bytes + offset % self._bytes, length))
            while chunk < (offset + length - 1) // self._bytes:
                chunk, rank = next(remaining), rank + 1
        return places

    def encoded(self, block: int) -> bytes:
        """Encode the list of chunks, for data that begins at `block` of the index."""
        content, done = bytearray(), 0
        for number in self.with_data:
            content += _HOLE * (number - done) + erofs.CHUNK_INDEX.pack(0, 0, block)
            block += 1 << self.bits
            done = number + 1
        return bytes(content + _HOLE * (self.count - done))


class IndexWriter:
    """Encodes the file tree of an image as an EROFS index."""

    def __init__(self, devices: int, uuid: bytes) -> None:
        """`devices`: the number of layer tars, which are the devices with the files' data;
        `EncodedIndex.put_devices` describes them later. `uuid`: 16 bytes."""
        self._devices, self._uuid = devices, uuid
        self._inodes: dict[int, _Inode] = {}  # by id() of the node
        self._directories: list[tuple[_Inode, list[list[tuple[bytes, _Inode]]]]] = []
        self._chunks_left = CHUNKS_LIMIT
        self._meta = _blocks((_FIRST_SLOT + devices) * erofs.DEVICE_SLOT.size)

    def write(self, root: ErofsNode) -> EncodedIndex:
        """Encode the tree with the root `root`. Call once. Raises BadLayer, ResourceExhausted for a
        tree that the format cannot represent."""
        for node in walk(root):
            self._inodes[id(node)] = _Inode(node, len(self._inodes) + 1)
        self._list_directories(root)
        end, data_blocks = self._lay_out()
        data = self._meta + _blocks(end)
        result = EncodedIndex(bytearray((data + data_blocks) * erofs.BLOCK), 0, len(self._inodes))
        sparse = self._sparse_files(result, data + data_blocks)
        for inode in self._inodes.values():
            self._put_inode(result.content, inode, data, sparse)
        for here, blocks in self._directories:
            _put_directory(result.content, (data + here.data) * erofs.BLOCK, blocks)
        self._put_superblock(result)
        return result

    def _list_directories(self, root: ErofsNode) -> None:
        """Count the hard links of each inode, and sort each directory's names into blocks."""
        inodes = self._inodes
        pending = [(inodes[id(root)], inodes[id(root)])]
        while pending:
            here, above = pending.pop()
            # A directory's links are its ".", its name in the parent, and the ".." of each
            # subdirectory, as on ext4: find(1) may rely on that number.
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
            # The kernel finds the block and the name in it by bisection (fs/erofs/namei.c).
            entries.sort(key=itemgetter(0))
            blocks, here.size = _split(entries)
            self._directories.append((here, blocks))

    def _lay_out(self) -> tuple[int, int]:
        """Set the offset of each inode, in the order of the tree. Return the end of the last inode,
        in bytes from meta_blkaddr, and the number of data blocks that follow the inodes."""
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
                    if node.sparse is not None:
                        inode.chunks = _Chunks(node, self._chunks_left)
                        self._chunks_left -= inode.chunks.count
                    count = inode.chunks.count if inode.chunks else 1
                    length += -length % erofs.CHUNK_INDEX.size + count * erofs.CHUNK_INDEX.size
            elif node.link:
                inode.size = len(node.link)
                tail = length + inode.size
                if tail <= erofs.BLOCK:
                    inode.layout, length = erofs.FLAT_INLINE, tail
                    if at % erofs.BLOCK + tail > erofs.BLOCK:  # inline data must not cross a block
                        at += -at % erofs.BLOCK
                else:
                    inode.data, data = data, data + _blocks(inode.size)
            inode.place = at
            at += length + -length % erofs.NID_UNIT
        return at, data

    def _sparse_files(self, result: EncodedIndex, end: int) -> dict[int, int]:
        """Place the data of all sparse files after the inodes and directories, beginning at the
        block `end` of the index. Append each file's SparseFile to `result.sparse`, and set
        `result.size_bytes`. Return, by inode number, the first block of each file's data. Raises
        ResourceExhausted."""
        places = {}
        first = end
        for inode in self._inodes.values():
            if inode.chunks is None:
                continue
            node = inode.node
            places[inode.number] = end
            pieces = inode.chunks.places(end * erofs.BLOCK)
            result.sparse.append(SparseFile(pieces, node.device, node.block * erofs.BLOCK))
            end += inode.chunks.blocks
            if (end - first) * erofs.BLOCK > SPARSE_LIMIT_BYTES:
                raise ResourceExhausted(
                    f"the image's sparse files have more than {SPARSE_LIMIT_BYTES} bytes of data"
                )
        result.size_bytes = end * erofs.BLOCK
        return places

    def _put_inode(
        self, content: bytearray, inode: _Inode, data: int, sparse: dict[int, int]
    ) -> None:
        node, place = inode.node, self._meta * erofs.BLOCK + inode.place
        after = place + erofs.INODE.size + len(inode.xattrs)
        union = 0
        if inode.layout == erofs.CHUNK_BASED:
            after += -after % erofs.CHUNK_INDEX.size
            if inode.chunks is None:
                bits = _chunk_bits(node.size)
                erofs.CHUNK_INDEX.pack_into(content, after, 0, node.device, node.block)
            else:
                bits = inode.chunks.bits
                chunks = inode.chunks.encoded(sparse[inode.number])
                content[after : after + len(chunks)] = chunks
            union = bits | erofs.CHUNK_INDEXES
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
            erofs.i_format(inode.layout), count, node.mode, 0, inode.size, union, inode.number,
            node.uid, node.gid, seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, inode.links,
        )  # fmt: skip
        if inode.xattrs:
            place += erofs.INODE.size
            content[place : place + len(inode.xattrs)] = inode.xattrs

    def _put_superblock(self, result: EncodedIndex) -> None:
        blocks = result.size_bytes // erofs.BLOCK
        incompatible = erofs.INCOMPAT_CHUNKED_FILE | (
            erofs.INCOMPAT_DEVICE_TABLE if self._devices else 0
        )
        # Without EROFS' checksum, which covers the superblock's block only; fs-verity covers the
        # file.
        erofs.SUPERBLOCK.pack_into(
            result.content, erofs.SUPERBLOCK_OFFSET,
            erofs.MAGIC, 0, erofs.COMPAT_MTIME, erofs.BLOCK_BITS, 0, 0, result.inodes, 0, 0, blocks,
            self._meta, 0, self._uuid, b"", incompatible, 0, self._devices,
            _FIRST_SLOT if self._devices else 0, 0, 0, 0, 0, 0,
        )  # fmt: skip


def _blocks(size: int) -> int:
    return _ceil(size, erofs.BLOCK)


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)


def _chunk_bits(size: int) -> int:
    """Return the lowest n for which a chunk of 2^n blocks contains a whole file of `size` bytes."""
    return (_blocks(size) - 1).bit_length()


def _sparse_chunk_bits(size: int, pieces: int) -> int:
    """Choose the chunk size with which a sparse file takes little space in the index. Return n for
    chunks of 2^n blocks. `size`: the file's bytes; `pieces`: the number of its pieces of data. A
    chunk is at least a page and at most the whole file; a file without data is one chunk."""
    largest = _chunk_bits(size)
    if not pieces:
        return largest
    chunk = math.isqrt(erofs.CHUNK_INDEX.size * size // pieces)
    return min(max(_PAGE_BITS, (chunk // erofs.BLOCK).bit_length() - 1), largest)


def _split(entries: list[tuple[bytes, _Inode]]) -> tuple[list[list[tuple[bytes, _Inode]]], int]:
    """Split sorted directory entries into blocks. Return the blocks, and the directory's size in
    bytes up to the end of the last entry."""
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
            kind = erofs.FILE_TYPES[stat.S_IFMT(inode.node.mode)]
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


def _xattrs(node: ErofsNode) -> bytes:
    """Encode the attributes that follow an inode, sorted by name, so that equal trees give equal
    bytes."""
    content = bytearray(erofs.XATTR_HEADER.pack(0, 0))
    for name, value in sorted(node.xattrs.items()):
        prefix, number = next((p, n) for p, n in erofs.XATTR_PREFIXES.items() if name.startswith(p))
        rest = name[len(prefix) :]
        content += erofs.XATTR_ENTRY.pack(len(rest), number, len(value)) + rest + value
        content += bytes(-len(content) % 4)
    if (len(content) - erofs.XATTR_HEADER.size) // 4 >= erofs.XATTR_COUNT_MAX:
        raise BadLayer(f"the extended attributes of a file are too large: {len(content)} bytes")
    return bytes(content)


def iterate_pieces(file: SparseFile) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in the index, offset on the device, length) for each piece of a sparse file."""
    source = file.source
    for offset, length in file.pieces:
        yield offset, source, length
        source += length
