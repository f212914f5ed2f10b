"""Reads the mode of the container's root folder from CRIU's `files.img`.

The root of a restored container gets this mode: CRIU opens the root again like any other file, and
refuses a mode that differs from the dump. If the container's image has no entry for the root, the
mode may differ, because some engines choose 0755 and others 0555.

A CRIU image begins with two magic numbers: one that all images share, and one for its kind. Each
entry after them is a length and a protobuf message. All numbers have 32 bits, little-endian.
Source: CRIU's images/fdinfo.proto, images/regfile.proto and include/magic.h.
"""

from __future__ import annotations

import os
from stat import S_IMODE, S_ISDIR
from struct import Struct

from pyrunc.checkpoint.criu import as_bytes, decode
from pyrunc.errors import InvalidArgument, PeerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

FILES = "files.img"
COMMON_MAGIC, FILES_MAGIC = 0x54564319, 0x56303138
MOST_ENTRY_BYTES = 1 << 20
_HEAD, _LENGTH = Struct("<II"), Struct("<I")
# file_entry, reg_file_entry
_REGULAR, _NAME, _MODE = 3, 6, 10


def root_mode(folder: str) -> int | None:
    """Return the permission bits of the dumped processes' root folder; None if the images in
    `folder` do not have them. Raises InvalidArgument for a malformed `files.img`, OSError."""
    try:
        number = os.open(
            f"{folder}/{FILES}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except FileNotFoundError:  # CRIU before 3.4
        return None
    with open(number, "rb") as file:
        for entry in _entries(file):
            try:
                fields = decode(as_bytes(decode(entry).get(_REGULAR, b"")))
            except PeerError:
                raise InvalidArgument(f"the checkpoint's {FILES} has a malformed entry") from None
            mode = fields.get(_MODE)
            # containers/storage gives the root 0555 where no layer has an entry for it, containerd
            # 0755.
            if fields.get(_NAME) == b"/" and isinstance(mode, int) and S_ISDIR(mode):
                return S_IMODE(mode)
    return None


def _entries(file: BinaryIO) -> Iterator[bytes]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or _HEAD.unpack(head) != (COMMON_MAGIC, FILES_MAGIC):
        raise InvalidArgument(f"the checkpoint's {FILES} does not begin with CRIU's magic numbers")
    while length := file.read(_LENGTH.size):
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        # Limited: the archive's author chooses the length.
        entry = file.read(size) if 0 < size <= MOST_ENTRY_BYTES else b""
        if not entry or len(entry) < size:
            raise InvalidArgument(
                f"the checkpoint's {FILES} ends within an entry, or has one that is too large"
            )
        yield entry
