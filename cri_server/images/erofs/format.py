"""The part of EROFS' on-disk format that an index of tars needs.

Source: Linux, fs/erofs/erofs_fs.h and Documentation/filesystems/erofs.rst. All numbers are
little-endian. Blocks are 512 bytes, as in a tar, so that a file's data begins at a block of the
tar.
"""

from __future__ import annotations

from struct import Struct

from cri_server.images.formats.digests import hex_of

BLOCK_BITS = 9
BLOCK = 1 << BLOCK_BITS
MAGIC = 0xE0F5E1E2
SUPERBLOCK_OFFSET = 1024
UUID_BYTES = 16
TAG_BYTES = 64  # of a device: a sha256 in hex, or half of a sha512

COMPAT_MTIME = 0x2  # inodes have modification times
INCOMPAT_CHUNKED_FILE = 0x4
INCOMPAT_DEVICE_TABLE = 0x8

SUPERBLOCK = Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
"""Fields: magic, checksum, compatible features, block bits, extension slots, root nid, inodes,
build time and its nanoseconds, blocks, meta_blkaddr, xattr_blkaddr, uuid, volume name, incompatible
features, compression algorithms, devices, first device slot, directory block bits, xattr prefixes
and where they start, packed nid, xattr filter."""

DEVICE_SLOT = Struct("<64sII56x")
"""Fields: tag, blocks, mapped address. The kernel counts devices from 1; device 0 is the file with
the superblock."""

INODE = Struct("<HHHHQIIIIQII16x")
"""An extended inode. Fields: i_format, i_xattr_icount, i_mode, unused, i_size, i_u, i_ino, i_uid,
i_gid, i_mtime, i_mtime_nsec, i_nlink."""
NID_BITS = 5  # an inode's number is its offset from meta_blkaddr in units of 32 bytes
NID_UNIT = 1 << NID_BITS

FLAT_PLAIN, FLAT_INLINE, CHUNK_BASED = 0, 2, 4
CHUNK_INDEXES = 1 << 5  # chunks are listed with their device
CHUNK_INDEX = Struct("<HHI")
"""Fields: high bits of the block, device, block."""
NO_BLOCK = 0xFFFFFFFF

DIRENT = Struct("<QHBB")
"""Fields: nid, offset of the name in its block, file type, reserved."""
FILE_TYPES = {0o100000: 1, 0o040000: 2, 0o020000: 3, 0o060000: 4, 0o010000: 5, 0o120000: 7}

XATTR_HEADER = Struct("<IB7x")
"""Fields: name filter, shared attributes."""
XATTR_ENTRY = Struct("<BBH")
"""Fields: length of the name after its prefix, prefix, length of the value."""
XATTR_PREFIXES = {
    b"user.": 1,
    b"system.posix_acl_access": 2,
    b"system.posix_acl_default": 3,
    b"security.": 6,
}
XATTR_COUNT_MAX = 0xFFFF


def i_format(layout: int) -> int:
    """Return the format field of an extended inode with this data layout."""
    return 1 | layout << 1


def encoded_device(major: int, minor: int) -> int:
    """Encode a device number as Linux' new_encode_dev() does."""
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def uuid_of(chain_id: str) -> bytes:
    """Return the UUID of an image's index: the first bytes of the image's top chain id."""
    return bytes.fromhex(hex_of(chain_id))[:UUID_BYTES]
