"""Reads a layer's blob as a tar stream. Recognizes gzip, zstd or plain bytes by the blob's first
bytes, decodes and hashes the content, and limits its size.

The media type is ignored: the diff id in the image's configuration decides whether this is the
right content. Three limits apply: the total size (at most the disk's free space), the zstd window,
and the number of empty members. The compression ratio has no limit, because a preallocated file of
zeros is legitimate, and takes no blocks on the disk (`zeros.is_hole`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from isal import igzip_lib

from cri_server.images.formats.digests import SHA256, hasher
from cri_server.images.layers.ring import Receiver
from pyrunc.errors import PeerError, ResourceExhausted
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.records import AbsolutePath

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# A blob may begin with a skippable frame (RFC 8878, section 3.1.2).
_ZSTD_MAGICS = {
    ZSTD_MAGIC,
    *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)),
}
_MAGIC_BYTES = 4
WINDOW_LOG_LIMIT = 27  # 128 MiB, what `zstd --ultra` may use without --long
EMPTY_MEMBERS_LIMIT = 10_000
_INPUT_BYTES = 256 << 10
_OUTPUT_BYTES = 256 << 10  # fits the cache: a megabyte at once takes a fifth longer
# The first input of a member is small: a decoder copies its unused input, and each of many small
# members would copy a whole block.
_FIRST_INPUT_BYTES = 4 << 10


_DECODER_ERRORS: Any = (zstd.ZstdError, igzip_lib.IsalError, ValueError, EOFError)


class BadLayer(PeerError):
    """The layer's bytes are not a tar, are damaged or hostile, or do not have the promised
    digest."""


class UnpackLimits(Record):
    """Limits what a layer or archive may unpack to, in bytes and in tar entries. The other fields
    are for error messages: `subject` names what is unpacked, `reason` names the limit that was
    reached, `folder` is the path of the full file system."""

    size_bytes: int = 64 << 30
    entries: int = 8_000_000
    reason: str = "the limit of a layer"
    subject: str = "the layer"
    folder: AbsolutePath = "/"

    def shared(self, times: int) -> UnpackLimits:
        """Return the limits of one copy of a layer that is unpacked `times` times. Size and entries
        are divided, so that all copies together stay within the limits of one layer."""
        if times == 1:
            return self
        return self.replace(
            size_bytes=self.size_bytes // times,
            entries=self.entries // times,
            reason=f"the limit of a layer that the image has {times} times",
        )


class LayerWork(Record):
    """The arguments of a job that reads a layer and writes to `folder`. The content must have the
    digest `diff_id`."""

    folder: AbsolutePath
    limits: UnpackLimits
    diff_id: str


_Decoder = igzip_lib.IgzipDecompressor | zstd.ZstdDecompressor


class TarStream:
    """Reads the tar stream in a blob. The blob is a descriptor, read from its position on, or a
    ring's receiver. Not thread-safe."""

    def __init__(
        self,
        blob: int | Receiver,
        limits: UnpackLimits | None = None,
        *,
        hashed: bool = True,
        decoded: bool = False,
        algorithm: str = SHA256,
    ) -> None:
        """`hashed`: compute the digest of the content, with `algorithm`. `decoded`: the blob is
        uncompressed content, which another process has decoded."""
        self._read = (
            blob.read if isinstance(blob, Receiver) else partial(os.read, blob, _INPUT_BYTES)
        )
        self._limits = limits or UnpackLimits()
        self._algorithm = algorithm
        self._hash = hasher(algorithm) if hashed else None
        self._input = memoryview(b"")
        self._used = 0
        self._block = memoryview(b"")
        self._blocks: Iterator[bytes | memoryview] = (
            self._as_it_is() if decoded else self._decoded()
        )
        self.size_bytes = 0

    def read_exact(self, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end of the stream."""
        if len(self._block) >= size:
            data, self._block = bytes(self._block[:size]), self._block[size:]
            return data
        return b"".join(bytes(piece) for piece in self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes, or fewer at the end of the stream, in pieces of any length. A piece
        is valid until the next one."""
        while size:
            if not self._block and not self._fill():
                return
            piece = self._block[:size]
            self._block = self._block[len(piece) :]
            size -= len(piece)
            yield piece

    def blocks(self) -> Iterator[memoryview]:
        """Yield the rest of the stream in pieces of any length. A piece is valid until the next
        one."""
        while self._block or self._fill():
            block, self._block = self._block, memoryview(b"")
            yield block

    def skip(self, size: int) -> int:
        """Skip `size` bytes, or fewer at the end of the stream; return the number of skipped
        bytes."""
        return sum(len(piece) for piece in self.pieces(size))

    def drain(self) -> str:
        """Read to the end; return the digest of the whole uncompressed stream, which is the layer's
        diff id ("" if the stream is not hashed)."""
        for _ in self.blocks():
            pass
        return f"{self._algorithm}:{self._hash.hexdigest()}" if self._hash else ""

    def expect(self, diff_id: str | None) -> str:
        """Read to the end of the stream; return its diff id. Raises BadLayer when this is not the
        expected `diff_id`; None accepts any."""
        content = self.drain()
        if diff_id is not None and content != diff_id:
            raise BadLayer(
                f"the layer's content is {content}, not {diff_id} as the image's configuration says"
            )
        return content

    def _fill(self) -> bool:
        block = next(self._blocks, b"")
        if not block:
            return False
        if self._hash:
            self._hash.update(block)
        self.size_bytes += len(block)
        if self.size_bytes > self._limits.size_bytes:
            raise ResourceExhausted(
                f"{self._limits.subject} unpacks to more than {self._limits.size_bytes} bytes:"
                f" {self._limits.reason}"
            )
        self._block = memoryview(block)
        return True

    def _as_it_is(self) -> Iterator[memoryview]:
        self._refill()
        while self._input:
            yield self._input
            self._refill()

    def _decoded(self) -> Iterator[bytes]:
        self._refill_magic()
        first = bytes(self._input[:_MAGIC_BYTES])
        if first.startswith(GZIP_MAGIC):
            yield from self._members(_gzip, "gzip")
        elif first in _ZSTD_MAGICS:
            yield from self._members(_zstd, "zstd")
        else:
            while self._input:
                yield bytes(self._input)
                self._refill()

    def _refill(self) -> None:
        data = self._read()
        self._input, self._used = data if isinstance(data, memoryview) else memoryview(data), 0

    def _refill_magic(self) -> None:
        """Read enough bytes to recognize the compression. (The first piece from a registry may be a
        single byte.)"""
        self._refill()
        while 0 < (size := len(self._input)) < _MAGIC_BYTES:
            start = bytes(self._input)
            self._refill()
            self._input = memoryview(start + bytes(self._input))
            if len(self._input) == size:  # the blob has no more
                return

    def _members(self, new: Callable[[], _Decoder], kind: str) -> Iterator[bytes]:
        """Yield the content of concatenated gzip members or zstd frames. `new` makes a decoder for
        each of them; `kind` names the compression in errors. Raises BadLayer when the last member
        or frame is incomplete."""
        empty = 0
        while self._used < len(self._input):
            produced = False
            for block in self._member(new(), kind):
                produced = True
                yield block
            empty = 0 if produced else empty + 1
            # An empty gzip member has 20 bytes and no output, so the other limits do not count it.
            # bgzip ends its files with one.
            if empty > EMPTY_MEMBERS_LIMIT:
                raise BadLayer(
                    f"the layer has more than {EMPTY_MEMBERS_LIMIT} empty {kind} members"
                )
            if self._used == len(self._input):
                self._refill()

    def _member(self, decoder: _Decoder, kind: str) -> Iterator[bytes]:
        window = _FIRST_INPUT_BYTES
        while not decoder.eof:
            part: bytes | memoryview = b""
            if decoder.needs_input:
                if self._used == len(self._input):
                    self._refill()
                part = self._input[self._used : self._used + window]
                if not part:
                    raise BadLayer(f"the layer's {kind} data is truncated")
                self._used, window = self._used + len(part), _INPUT_BYTES
            try:
                # Without a limit for one call, a few KiB could become gigabytes before their size
                # is checked.
                block = decoder.decompress(part, _OUTPUT_BYTES)
            except _DECODER_ERRORS as error:
                raise BadLayer(f"the layer's {kind} data is damaged: {error}") from None
            finally:
                part = b""  # an error's stack frames would keep a ring's memory alive
            if block:
                yield block
        self._used -= len(decoder.unused_data)


def _gzip() -> _Decoder:
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)


def _zstd() -> _Decoder:
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG_LIMIT}
    return zstd.ZstdDecompressor(options=options)
