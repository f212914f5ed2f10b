"""Tests that a layer's compression is recognized by its first bytes, in whatever pieces they
arrive."""

from __future__ import annotations

import gzip
import os
import socket
import sys

import pytest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from cri_server.images.layers.inflate import TarStream

CONTENT = b"the content of a layer"
ZSTD_OF_CONTENT = bytes(zstd.compress(CONTENT))
ENCODED = {
    "gzip": (gzip.compress(CONTENT), CONTENT),
    "zstd": (ZSTD_OF_CONTENT, CONTENT),
    "zstd behind a skippable frame": (b"\x50\x2a\x4d\x18\1\0\0\0x" + ZSTD_OF_CONTENT, CONTENT),
    "plain": (CONTENT, CONTENT),
    "three bytes": (b"abc", b"abc"),
    "empty": (b"", b""),
}


def decode(blob: bytes, first_bytes: int) -> bytes:
    """Decode a blob; the first read returns `first_bytes` bytes of it, each later read one byte."""
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with receiving:
        with sending:
            pieces = [blob[:first_bytes], *(blob[n : n + 1] for n in range(first_bytes, len(blob)))]
            for piece in filter(None, pieces):
                sending.send(piece)
        fd = os.dup(receiving.fileno())
    try:
        return b"".join(bytes(block) for block in TarStream(fd).blocks())
    finally:
        os.close(fd)


@pytest.mark.parametrize("first_bytes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ENCODED)
def test_the_first_piece_may_be_a_single_byte(kind: str, first_bytes: int) -> None:
    blob, content = ENCODED[kind]
    assert decode(blob, first_bytes) == content
