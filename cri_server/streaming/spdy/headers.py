"""Encodes and decodes SPDY header blocks: name-value pairs, compressed with one zlib stream per
direction of a connection.

Both zlib streams start from the dictionary of SPDY/3 (its Adler-32 is e3c6a7c2), and are flushed
after each block, but not ended. All blocks share this state, so a block that cannot be decompressed
is a connection error. The decompressed size is limited, so that a small frame cannot fill the
memory.
"""

from __future__ import annotations

import zlib

from cri_server.streaming.spdy.frames import WORD

BLOCK_LIMIT_BYTES = 16 * 1024
PAIRS_LIMIT = 64

Headers = dict[str, list[str]]

# The dictionary is a list of words, each after its length in 32 bits, and a tail without lengths.
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language"
    " accept-ranges age allow"
    " authorization cache-control connection content-base content-encoding content-language"
    " content-length"
    " content-location content-md5 content-range content-type date etag expect expires from host"
    " if-match"
    " if-modified-since if-none-match if-range if-unmodified-since last-modified location"
    " max-forwards pragma"
    " proxy-authenticate proxy-authorization range referer retry-after server te trailer"
    " transfer-encoding upgrade"
    " user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url"
    " public set-cookie"
    " keep-alive origin"
)
_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401"
    " Unauthorized"
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun,"
    " GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/pla"
    "in,"
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,e"
    "nq=0."
)


def _dictionary() -> bytes:
    words = [word.replace("_", " ").encode() for word in _WORDS.split(" ")]
    return b"".join(WORD.pack(len(word)) + word for word in words) + _TAIL.encode()


DICTIONARY = _dictionary()


class MalformedHeaders(ValueError):
    """A header block that cannot be decompressed, is too large, or has invalid names or values."""


class Packer:
    """Compresses the header blocks that the server sends. Call it in the order in which the frames
    are sent."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(zdict=DICTIONARY)

    def pack(self, headers: Headers) -> bytes:
        """Compress a header block. Names become lower case, and several values of a name are joined
        by NUL."""
        parts = [WORD.pack(len(headers))]
        for name, values in headers.items():
            for text in (name.lower().encode("latin-1"), "\0".join(values).encode("utf-8")):
                parts += (WORD.pack(len(text)), text)
        return self._stream.compress(b"".join(parts)) + self._stream.flush(zlib.Z_SYNC_FLUSH)


class Unpacker:
    """Decompresses the header blocks that the client sends. Call it in the order of their
    frames."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zdict=DICTIONARY)

    def unpack(self, block: bytes) -> Headers:
        """Decompress a header block. Raises MalformedHeaders; the connection must then be
        closed."""
        try:
            # The output is limited while it is made: a frame of 64 KiB could expand to 64 MiB.
            plain = self._stream.decompress(block, BLOCK_LIMIT_BYTES)
        except zlib.error as error:
            raise MalformedHeaders(f"header block: {error}") from None
        if self._stream.unconsumed_tail:
            raise MalformedHeaders(f"the header block exceeds {BLOCK_LIMIT_BYTES} bytes")
        if self._stream.eof or self._stream.unused_data:
            raise MalformedHeaders("the client ended the compressed stream of the headers")
        return _parse(plain)


def _parse(plain: bytes) -> Headers:
    count, position = _word(plain, 0)
    if count > PAIRS_LIMIT:
        raise MalformedHeaders(f"{count} headers are too many")
    headers: Headers = {}
    for _ in range(count):
        name, position = _text(plain, position)
        value, position = _text(plain, position)
        # The draft demands names in lower case, each once; several values are joined by NUL.
        if not name or name != name.lower() or name in headers:
            raise MalformedHeaders(f"invalid or repeated header name {name[:40]!r}")
        headers[name] = value.split("\0")
    if position != len(plain):
        raise MalformedHeaders("data after the last header")
    return headers


def _text(plain: bytes, position: int) -> tuple[str, int]:
    length, position = _word(plain, position)
    if length > len(plain) - position:
        raise MalformedHeaders("a header name or value is longer than the rest of the header block")
    try:
        return plain[position : position + length].decode("utf-8"), position + length
    except UnicodeDecodeError:
        raise MalformedHeaders("a header is not UTF-8") from None


def _word(plain: bytes, position: int) -> tuple[int, int]:
    if len(plain) - position < WORD.size:
        raise MalformedHeaders("header block is too short")
    return int(WORD.unpack_from(plain, position)[0]), position + WORD.size
