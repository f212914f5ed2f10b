"""Header compression (RFC 7541): a decoder that is fast for gRPC clients, and literals for replies.

A gRPC client repeats its headers as references to the dynamic table, so the decoder needs one list
access per header. Whole blocks cannot be cached, because the Go client adds an entry with each call
(its deadline). Replies use no dynamic table: `EMPTY_TABLE`, sent once, sets its size to 0.
"""

from __future__ import annotations

from cri_server.http2.huffman import BadHuffman
from cri_server.http2.huffman import decode as decode_huffman
from pyrunc.varint import varint

Field = tuple[bytes, bytes]

TABLE_LIMIT_BYTES = 4096  # SETTINGS_HEADER_TABLE_SIZE, which we leave at its initial value
ENTRY_OVERHEAD_BYTES = 32  # section 4.1
INTEGER_LIMIT = 1 << 32
EMPTY_TABLE = b"\x20"  # a size update to 0: an encoder that keeps no table
STATUS_200 = b"\x88"

# fmt: off
STATIC: tuple[tuple[str, str], ...] = (
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"),
    (":path", "/index.html"), (":scheme", "http"), (":scheme", "https"), (":status", "200"),
    (":status", "204"), (":status", "206"), (":status", "304"), (":status", "400"),
    (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""),
    ("accept", ""), ("access-control-allow-origin", ""), ("age", ""), ("allow", ""),
    ("authorization", ""), ("cache-control", ""), ("content-disposition", ""),
    ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""),
    ("date", ""), ("etag", ""), ("expect", ""), ("expires", ""), ("from", ""), ("host", ""),
    ("if-match", ""), ("if-modified-since", ""), ("if-none-match", ""), ("if-range", ""),
    ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""), ("location", ""),
    ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""),
    ("via", ""), ("www-authenticate", ""),
)
# fmt: on
_STATIC: list[Field | None] = [None, *((name.encode(), value.encode()) for name, value in STATIC)]
_FIRST_DYNAMIC = len(_STATIC)


class BadBlock(Exception):
    """An invalid header block. The dynamic tables of encoder and decoder then differ, so no later
    block can be decoded."""


# The package hpack takes 69 µs for the header block of a Go client, this decoder 11.
class HpackDecoder:
    """Decodes the blocks of one connection. The table is one list: the static entries, then the
    dynamic ones, newest first."""

    __slots__ = ("_limit_bytes", "_size_bytes", "_table")

    def __init__(self) -> None:
        self._table = list(_STATIC)
        self._size_bytes, self._limit_bytes = 0, TABLE_LIMIT_BYTES

    def decode(self, block: bytes, list_limit_bytes: int) -> list[Field] | None:
        """Decode the fields of `block`; return None if they exceed `list_limit_bytes`. The size of
        a field is that of its name and value plus ENTRY_OVERHEAD_BYTES, as in the dynamic table.
        Raises BadBlock."""
        fields: list[Field] = []
        size_bytes = at = 0
        table, end = self._table, len(block)
        try:
            while at < end:
                octet = block[at]
                at += 1
                if octet >= 0x80:
                    index = octet & 0x7F
                    if index == 0x7F:
                        index, at = _integer(block, at, 0x7F)
                    field = table[index]
                    if field is None:
                        raise BadBlock("a field has the index 0")
                elif octet >= 0x20 and octet < 0x40:
                    if fields or size_bytes:
                        raise BadBlock(
                            "a table size update after the first field (RFC 7541 section 4.2)"
                        )
                    at = self._resize(block, at, octet)
                    continue
                else:
                    field, at = self._literal(block, at, octet)
                # A reference counts with the size of its field: an octet can refer to 4 KiB, so
                # short blocks exhausted memory (the HPACK bomb, CVE-2016-6581). Beyond the limit
                # decoding continues, because the table must stay equal to the encoder's.
                size_bytes += len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES
                if size_bytes <= list_limit_bytes:
                    fields.append(field)
        except IndexError:
            raise BadBlock("an index beyond the table, or a truncated block") from None
        except BadHuffman as error:
            raise BadBlock(str(error)) from None
        return fields if size_bytes <= list_limit_bytes else None

    def _literal(self, block: bytes, at: int, octet: int) -> tuple[Field, int]:
        """Decode the literal field that begins with `octet` and continues at `at`; return the field
        and the position after it. A field with incremental indexing (0x40) is added to the dynamic
        table."""
        # Literals "never indexed" (0001) are decoded like those "without indexing" (0000): the
        # difference concerns proxies (section 6.2.3).
        mask = 0x3F if octet & 0x40 else 0x0F
        index = octet & mask
        if index == mask:
            index, at = _integer(block, at, mask)
        if index:
            entry = self._table[index]
            assert entry is not None
            name = entry[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        field = (name, value)
        if octet & 0x40:
            self._size_bytes += _size(field)
            self._table.insert(_FIRST_DYNAMIC, field)
            # An entry larger than the table is no error: it empties the table (section 4.4).
            self._evict()
        return field, at

    def _evict(self) -> None:
        while self._size_bytes > self._limit_bytes:
            oldest = self._table.pop()
            assert oldest is not None
            self._size_bytes -= _size(oldest)

    def _resize(self, block: bytes, at: int, octet: int) -> int:
        size = octet & 0x1F
        if size == 0x1F:
            size, at = _integer(block, at, 0x1F)
        if size > TABLE_LIMIT_BYTES:
            raise BadBlock(f"a dynamic table of {size} bytes is too large")
        self._limit_bytes = size
        self._evict()
        return at


def _size(field: Field) -> int:
    return len(field[0]) + len(field[1]) + ENTRY_OVERHEAD_BYTES


def _integer(block: bytes, at: int, value: int) -> tuple[int, int]:
    """Decode an integer that exceeds its prefix (section 5.1). `value`: the prefix, all ones; `at`:
    the position of the octet after it. Return the integer and the position after it. Raises
    IndexError at the block's end, BadBlock for an integer that is too large."""
    shift = 0
    while True:
        octet = block[at]
        at += 1
        value += (octet & 0x7F) << shift
        shift += 7
        # The shift is limited, too: octets of 0x80 would extend a small number without end (section
        # 5.1).
        if value > INTEGER_LIMIT or shift > 35:
            raise BadBlock("an integer is too large")
        if octet < 0x80:
            return value, at


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    octet = block[at]
    at += 1
    length = octet & 0x7F
    if length == 0x7F:
        length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise BadBlock("a string exceeds its block")
    text = block[at:end]
    return (decode_huffman(text) if octet & 0x80 else text), end


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a field as a literal without indexing, with a new name (section 6.2.2)."""
    return b"\x00" + _prefixed(name) + _prefixed(value)


def _prefixed(text: bytes) -> bytes:
    if len(text) < 0x7F:
        return bytes([len(text)]) + text
    return b"\x7f" + varint(len(text) - 0x7F) + text
