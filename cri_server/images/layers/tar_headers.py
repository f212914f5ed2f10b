"""Parses tar headers: ustar, GNU (long names, base-256 numbers, sparse files) and PAX. Names are
bytes, and every number is checked.

Python's tarfile is not used: it treats a bad header in the middle as the end of the archive, reads
an extended header of any claimed size into memory, and decodes names. A test compares this parser
with tarfile. Global PAX headers are ignored, as in containerd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from typing import Protocol
from zlib import adler32

from cri_server.images.layers.inflate import BadLayer

BLOCK = 512
EXTENDED_LIMIT_BYTES = 1 << 20  # as Go's archive/tar
EXTENDED_TOTAL_BYTES = 2 << 20
SPARSE_LIMIT = 1 << 20
NAME_LIMIT_BYTES = 4096
HIGHEST_ID = 2**32 - 2  # 2^32-1 means "leave it" to chown
SIZE_LIMIT_BYTES = 1 << 62
EARLIEST_S, LATEST_S = -(2**31), 2**34 - 2**31 - 1  # what ext4 can store

FILE, DIRECTORY, SYMLINK, HARDLINK = "file", "directory", "symbolic link", "hard link"
CHARACTER, BLOCK_DEVICE, FIFO = "character device", "block device", "fifo"
_KINDS = {
    b"0": FILE, b"\0": FILE, b"7": FILE, b"S": FILE, b"1": HARDLINK, b"2": SYMLINK,
    b"3": CHARACTER, b"4": BLOCK_DEVICE, b"5": DIRECTORY, b"6": FIFO, b"D": DIRECTORY,
}  # fmt: skip
_WITH_DATA = {b"0", b"\0", b"7", b"S", b"D", b"V", b"M", b"N"}
_SPECIAL = {b"x", b"X", b"L", b"K"}  # describe the member that follows
_IGNORED = {b"V", b"N"}  # a volume's label; old GNU's rename list
_HEADER = Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12s")
_XATTR = b"SCHILY.xattr."


class TarSource(Protocol):
    """A tar to read: `inflate.TarStream`, or `erofs.tar_file.TarFile`."""

    def read_exact(self, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end."""

    def skip(self, size: int) -> int:
        """Skip `size` bytes, or fewer at the end; return the number of skipped bytes."""


@dataclass(slots=True)
class TarMember:
    """A member of a tar. `size`: the bytes of the file. `stored`: the bytes of its data in the
    archive, fewer for a sparse file. `sparse`: where the stored data lies in the file, as (offset,
    length) pairs; None when the whole file is stored. `name` and `link` are as written, without
    NUL."""

    name: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    stored: int
    mtime_ns: int
    link: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    sparse: list[tuple[int, int]] | None = None


@dataclass(slots=True)
class _Extended:
    """Special headers (PAX, GNU long names) for the member that follows them."""

    name: bytes | None = None
    link: bytes | None = None
    pax: dict[bytes, bytes] = field(default_factory=dict)
    sparse_pairs: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0

    def count(self, data: bytes) -> bytes:
        """Add the length of `data` to the sum for this member, and return `data`. Raises BadLayer
        if the sum exceeds EXTENDED_TOTAL_BYTES, because a member may have any number of special
        headers."""
        self.size += len(data)
        if self.size > EXTENDED_TOTAL_BYTES:
            raise BadLayer(
                f"the tar has extended headers of more than {EXTENDED_TOTAL_BYTES} bytes"
                " for one member"
            )
        return data


def members(stream: TarSource) -> Iterator[TarMember]:
    """Yield the members in order. After a FILE the caller must read its `stored` bytes from the
    stream. Raises BadLayer unless the stream is a whole, well-formed tar."""
    extended = nothing = _Extended()
    special = False
    while (header := _next_header(stream)) is not None:
        kind = header[7]
        if kind in _SPECIAL and extended is nothing:
            extended = _Extended()
        if kind in (b"x", b"X"):
            _pax(extended.count(_extended_data(stream, header)), extended)
        elif kind == b"g":
            _extended_data(stream, header)
        elif kind == b"L":
            extended.name = extended.count(_extended_data(stream, header)).rstrip(b"\0")
        elif kind == b"K":
            extended.link = extended.count(_extended_data(stream, header)).rstrip(b"\0")
        elif kind in _IGNORED:
            skip(stream, _padded(_number(header[4], "size")))
        else:
            entry = _entry(stream, header, extended)
            yield entry
            if rest := -entry.stored % BLOCK + (0 if entry.kind == FILE else entry.stored):
                skip(stream, rest)
            extended = nothing
        special = kind in _SPECIAL
    if special:
        raise BadLayer("the tar ends after an extended header")


def skip(stream: TarSource, size: int) -> None:
    """Skip `size` bytes. Raises BadLayer if the tar has fewer bytes left."""
    if stream.skip(size) < size:
        raise BadLayer("the tar is truncated")


def _next_header(stream: TarSource) -> tuple[bytes, ...] | None:
    """Return the fields of the next header; None at a zero block, and at the end of the stream.
    Raises BadLayer."""
    block = stream.read_exact(BLOCK)
    if len(block) < BLOCK:
        if not block:
            return None
        raise BadLayer("the tar is truncated in a header")
    if not block[0] and not block.strip(b"\0"):
        return None
    fields = _HEADER.unpack(block)
    expected = _number(fields[6], "checksum")
    total = _sum(block[:256]) + _sum(block[256:]) - sum(fields[6]) + 8 * 0x20
    if total != expected:
        above = sum(1 for byte in block[:148] + block[156:] if byte > 127)
        if total - 256 * above != expected:  # some old tars summed signed bytes
            raise BadLayer("the tar has a header with a wrong checksum")
    return fields


def _sum(block: bytes) -> int:
    """Return the sum of the bytes of `block`, which has at most 256 bytes."""
    # The lower half of an Adler-32 checksum is 1 + the sum of the bytes, modulo 65521, which a sum
    # of 256 bytes cannot reach. The builtin `sum` takes ten times as long: a sixth of the time to
    # make an index.
    return (adler32(block) & 0xFFFF) - 1


def _padded(size: int) -> int:
    return size + -size % BLOCK


def _extended_data(stream: TarSource, header: tuple[bytes, ...]) -> bytes:
    size = _number(header[4], "size")
    if size > EXTENDED_LIMIT_BYTES:
        raise BadLayer(f"the tar has an extended header that is too large: {size} bytes")
    data = stream.read_exact(_padded(size))
    if len(data) < _padded(size):
        raise BadLayer("the tar is truncated in an extended header")
    return data[:size]


def _entry(stream: TarSource, header: tuple[bytes, ...], extended: _Extended) -> TarMember:
    pax, type_flag = extended.pax, header[7]
    name = _name(header) if extended.name is None else extended.name
    link = extended.link if extended.link is not None else header[8].partition(b"\0")[0]
    xattrs = {}
    if pax:
        # GNU tar writes a placeholder as the path of a sparse file: GNUSparseFile.PID/NAME.
        name = pax.get(b"GNU.sparse.name", pax.get(b"path", name))
        link = pax.get(b"linkpath", link)
        xattrs = {
            key.removeprefix(_XATTR): value for key, value in pax.items() if key.startswith(_XATTR)
        }
    kind = _KINDS.get(type_flag)
    if kind is None:
        raise BadLayer(f"{quoted(name)}: tar entries of type {type_flag!r} are not supported")
    if kind == FILE and name.endswith(b"/"):
        kind = DIRECTORY  # before ustar, directories were files with a slash
    stored = _number_of(pax, b"size", header[4])
    # A link's header may have the size of its target (Go's isHeaderOnly ignores it, too).
    if type_flag not in _WITH_DATA:
        stored = 0
    device = kind in (CHARACTER, BLOCK_DEVICE)
    if b"mtime" in pax:
        mtime_ns = _time(pax[b"mtime"])
    else:
        mtime_ns = _clamped(_number(header[5], "mtime", True), 0)
    entry = TarMember(
        name=_checked_name(name, "name"),
        kind=kind,
        mode=_number(header[1], "mode") & 0o7777,
        uid=_identity(_number_of(pax, b"uid", header[2]), name),
        gid=_identity(_number_of(pax, b"gid", header[3]), name),
        size=stored,
        stored=stored,
        mtime_ns=mtime_ns,
        link=_checked_name(link, "link target") if kind in (HARDLINK, SYMLINK) else b"",
        major=_number(header[13], "device number") if device else 0,
        minor=_number(header[14], "device number") if device else 0,
        xattrs=xattrs,
    )
    if pax or extended.sparse_pairs or type_flag == b"S":
        _sparse(stream, header, extended, entry)
    return entry


def _name(header: tuple[bytes, ...]) -> bytes:
    name = header[0].partition(b"\0")[0]
    if header[9] != b"ustar\0" or not header[15].strip(b"\0"):
        return name
    # star's format, marked by "tar" at the end: its prefix is shorter, and two timestamps follow
    # the prefix.
    prefix = header[15][:131] if header[16].endswith(b"tar\0") else header[15]
    return prefix.partition(b"\0")[0] + b"/" + name


def _checked_name(name: bytes, what: str) -> bytes:
    if b"\0" in name:
        raise BadLayer(f"{quoted(name)}: the {what} contains a NUL byte")
    if len(name) > NAME_LIMIT_BYTES:
        raise BadLayer(f"{quoted(name)}: the {what} is longer than {NAME_LIMIT_BYTES} bytes")
    return name


@lru_cache(1024)  # owners, modes and times repeat
def _number(text: bytes, what: str, signed: bool = False) -> int:
    """Parse octal text, or GNU's base-256, whose first byte is 0x80 (0xff for a negative number).
    `what`: the field's name, for errors. `signed`: permit negative numbers. Raises BadLayer."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big", signed=text[0] == 0xFF)
        if text[0] != 0xFF:
            value -= 1 << (8 * len(text) - 1)
    else:
        digits = text.partition(b"\0")[0].strip(b" ")
        try:
            value = int(digits, 8) if digits else 0
        except ValueError:
            raise BadLayer(f"the tar has a header whose {what} is not a number") from None
    if (value < 0 and not signed) or abs(value) > SIZE_LIMIT_BYTES:
        raise BadLayer(f"the tar has a header whose {what} is out of range")
    return value


def _number_of(pax: dict[bytes, bytes], key: bytes, field: bytes) -> int:
    """Return the number in the PAX record `key`; without such a record, the number in the header's
    `field`."""
    return _pax_number(pax, key) if key in pax else _number(field, key.decode())


def _identity(value: int, name: bytes) -> int:
    if value > HIGHEST_ID:
        raise BadLayer(f"{quoted(name)}: owner {value} is out of range")
    return value


def _clamped(seconds: int, nanoseconds: int) -> int:
    """Return the time in ns, limited to what ext4 stores, as Linux' timestamp_truncate() does: at
    the ends of the range the nanoseconds are dropped."""
    seconds = min(max(seconds, EARLIEST_S), LATEST_S)
    return seconds * 1_000_000_000 + (nanoseconds if EARLIEST_S < seconds < LATEST_S else 0)


# ---- PAX records


def _pax(data: bytes, extended: _Extended) -> None:
    """Parse `LENGTH KEY=VALUE\\n` records. A later record of the same key wins; an empty value
    removes the key (POSIX pax)."""
    offset: int | None = None
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        text = data[at:space]
        if space < 0 or not text.isdigit():
            raise BadLayer("the tar has a PAX record without a length")
        end = at + int(text)
        record = data[space + 1 : end]
        if end > len(data) or not record.endswith(b"\n") or b"=" not in record:
            raise BadLayer("the tar has a malformed PAX record")
        key, _, value = record[:-1].partition(b"=")
        at = end
        if key == b"GNU.sparse.offset":
            offset = _decimal(value, "sparse offset")
        elif key == b"GNU.sparse.numbytes" and offset is not None:
            extended.sparse_pairs.append((offset, _decimal(value, "sparse length")))
            offset = None
        elif value:
            extended.pax[key] = value
        else:
            extended.pax.pop(key, None)


def _pax_number(pax: dict[bytes, bytes], key: bytes) -> int:
    if key not in pax:
        raise BadLayer(f"the tar has a sparse file without {key.decode()}")
    return _decimal(pax[key], key.decode())


def _decimal(text: bytes, what: str) -> int:
    if not text.isdigit() or len(text) > 19 or int(text) > SIZE_LIMIT_BYTES:
        raise BadLayer(f"the tar has a {what} that is not a number or out of range")
    return int(text)


def _time(text: bytes) -> int:
    """Parse seconds with a fraction of any length to nanoseconds; a float would lose the last
    digits."""
    whole, _, fraction = text.strip().partition(b".")
    negative = whole.startswith(b"-")
    digits = whole.removeprefix(b"-")
    if len(digits) > 18 or not (digits + fraction).isdigit():
        raise BadLayer("the tar has a time that is not a number")
    nanoseconds = int(fraction[:9].ljust(9, b"0")) if fraction else 0
    total_ns = int(digits or b"0") * 1_000_000_000 + nanoseconds
    return _clamped(*divmod(-total_ns if negative else total_ns, 1_000_000_000))


# ---- sparse files


def _sparse(
    stream: TarSource, header: tuple[bytes, ...], extended: _Extended, entry: TarMember
) -> None:
    """Set the entry's sparse map and size from one of GNU's four forms: the old header, and PAX 0.0
    (pairs), 0.1 (a list), 1.0 (a list before the data)."""
    pax = extended.pax
    if header[7] == b"S":
        entry.sparse, entry.size = _old_sparse(stream, header)
    elif pax.get(b"GNU.sparse.major") == b"1":
        entry.size = _pax_number(pax, b"GNU.sparse.realsize")
        entry.sparse = _sparse_list_before_data(stream, entry)
    elif b"GNU.sparse.map" in pax:
        numbers = [_decimal(n, "sparse map") for n in pax[b"GNU.sparse.map"].split(b",")]
        entry.sparse = _paired(numbers)
        entry.size = _pax_number(pax, b"GNU.sparse.size")
    elif extended.sparse_pairs:
        entry.sparse = extended.sparse_pairs
        entry.size = _pax_number(pax, b"GNU.sparse.size")
    if entry.sparse is not None:
        _check_sparse(entry)


def _old_sparse(stream: TarSource, header: tuple[bytes, ...]) -> tuple[list[tuple[int, int]], int]:
    # from offset 345: 41 bytes of old times, 4 pairs, a flag, the real size
    raw = header[15] + header[16]
    pairs = _old_pairs(raw[41 : 41 + 96])
    size = _number(raw[138:150], "sparse size")
    more = raw[137]
    while more:
        block = stream.read_exact(BLOCK)
        if len(block) < BLOCK:
            raise BadLayer("the tar is truncated in a sparse map")
        pairs += _old_pairs(block[:504])
        more = block[504]
        if len(pairs) > SPARSE_LIMIT:
            raise BadLayer("the tar has a sparse map that is too long")
    return pairs, size


def _old_pairs(raw: bytes) -> list[tuple[int, int]]:
    pairs = []
    for at in range(0, len(raw), 24):
        if not raw[at : at + 24].strip(b"\0"):
            break
        pairs.append(
            (
                _number(raw[at : at + 12], "sparse offset"),
                _number(raw[at + 12 : at + 24], "sparse length"),
            )
        )
    return pairs


def _sparse_list_before_data(stream: TarSource, entry: TarMember) -> list[tuple[int, int]]:
    data = b""

    def line() -> int:
        nonlocal data
        while b"\n" not in data:
            if len(data) > 20 or entry.stored < BLOCK:
                raise BadLayer(f"{quoted(entry.name)}: the sparse map is malformed")
            block = stream.read_exact(BLOCK)
            if len(block) < BLOCK:
                raise BadLayer("the tar is truncated in a sparse map")
            entry.stored -= BLOCK
            data += block
        text, _, data = data.partition(b"\n")
        return _decimal(text, "sparse map")

    count = line()
    if count > SPARSE_LIMIT:
        raise BadLayer("the tar has a sparse map that is too long")
    return [(line(), line()) for _ in range(count)]


def _paired(numbers: list[int]) -> list[tuple[int, int]]:
    if len(numbers) % 2 or len(numbers) > 2 * SPARSE_LIMIT:
        raise BadLayer("the tar has a malformed sparse map")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _check_sparse(entry: TarMember) -> None:
    """Check that the pieces are in order, do not overlap, lie inside the file, and add up to the
    stored bytes."""
    at = total = 0
    for offset, length in entry.sparse or []:
        if offset < at or offset + length > entry.size:
            raise BadLayer(f"{quoted(entry.name)}: the sparse map is out of order or out of range")
        at, total = offset + length, total + length
    if total != entry.stored:
        raise BadLayer(f"{quoted(entry.name)}: the sparse map does not fit the data")


def quoted(name: bytes) -> str:
    """Return a name for an error message: printable, and at most as long as a line."""
    text = name.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 120 else text[:120] + "…")
