"""Tests header compression with the examples of RFC 7541 and with the `hpack` library as the
peer."""

from __future__ import annotations

import random

import hpack as peer
import pytest
from hpack.hpack import HeaderTable  # type: ignore[attr-defined]
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given, settings
from hypothesis import strategies as st

from cri_server.http2 import hpack, huffman
from cri_server.http2.hpack import BadBlock, Field, HpackDecoder

LIMIT = 1 << 20


def decode(decoder: HpackDecoder, text: str) -> list[Field]:
    fields = decoder.decode(bytes.fromhex(text), LIMIT)
    assert fields is not None
    return fields


def test_the_requests_of_the_rfc_are_decoded() -> None:
    first = [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/"),
        (b":authority", b"www.example.com"),
    ]
    second = [*first, (b"cache-control", b"no-cache")]
    third = [
        (b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"),
        (b":authority", b"www.example.com"), (b"custom-key", b"custom-value"),
    ]  # fmt: skip
    # RFC 7541, appendix C.3, and C.4 with Huffman coding: three requests on one connection each.
    plain, coded = HpackDecoder(), HpackDecoder()
    assert decode(plain, "828684410f7777772e6578616d706c652e636f6d") == first
    assert decode(plain, "828684be58086e6f2d6361636865") == second
    assert decode(plain, "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565") == third
    assert decode(coded, "828684418cf1e3c2e5f23a6ba0ab90f4ff") == first
    assert decode(coded, "828684be5886a8eb10649cbf") == second
    assert decode(coded, "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf") == third


def test_the_tables_equal_those_of_the_library() -> None:
    assert [(n.encode(), v.encode()) for n, v in hpack.STATIC] == list(HeaderTable.STATIC_TABLE)
    assert list(huffman.LENGTHS) == list(REQUEST_CODES_LENGTH)


@given(st.binary(max_size=300))
def test_huffman_codes_are_decoded(text: bytes) -> None:
    assert huffman.decode(HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text)) == text


@pytest.mark.parametrize(
    "coded",
    [
        "ff",  # eight bits of padding
        "00",  # `0` and three bits of padding that are not ones
        "ffffffff",  # the end of string symbol
        "1fff",  # a symbol, and more than seven bits of padding
    ],
)
def test_invalid_huffman_codes_are_refused(coded: str) -> None:
    with pytest.raises(huffman.BadHuffman):
        huffman.decode(bytes.fromhex(coded))


NAMES = st.sampled_from(
    [b":path", b":method", b"grpc-timeout", b"te", b"x-a", b"content-type", b"x" * 200]
)
VALUES = st.one_of(st.sampled_from([b"", b"POST", b"/", b"trailers"]), st.binary(max_size=400))
FIELDS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=12)


@given(
    st.lists(
        st.tuples(FIELDS, st.booleans(), st.sampled_from([None, 0, 64, 500, 4096])), max_size=8
    )
)
@settings(deadline=None)
def test_blocks_of_the_library_are_decoded(
    blocks: list[tuple[list[tuple[bytes, bytes, bool]], bool, int | None]],
) -> None:
    """The blocks of one connection add and evict table entries, resize the table, and have
    sensitive fields."""
    encoder, decoder = peer.Encoder(), HpackDecoder()
    for fields, coded, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode(fields, huffman=coded)
        assert decoder.decode(block, LIMIT) == [(name, value) for name, value, _ in fields]


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=20_000)), max_size=5)
)
def test_the_library_decodes_our_blocks(fields: list[Field]) -> None:
    block = hpack.EMPTY_TABLE + b"".join(hpack.literal(name, value) for name, value in fields)
    decoder = peer.Decoder(max_header_list_size=1 << 20)
    assert [tuple(f) for f in decoder.decode(block, raw=True)] == fields


def test_garbage_has_the_same_result_as_in_the_library_or_is_refused() -> None:
    chance = random.Random(7541)
    agreed = 0
    for _ in range(20_000):
        block = chance.randbytes(chance.randrange(1, 12))
        ours, theirs = HpackDecoder(), peer.Decoder(max_header_list_size=LIMIT)
        theirs.max_allowed_table_size = hpack.TABLE_LIMIT_BYTES
        try:
            expected = [tuple(f) for f in theirs.decode(block, raw=True)]
        except (peer.HPACKError, IndexError, ValueError):
            expected = None
        try:
            decoded = ours.decode(block, LIMIT)
        except BadBlock:
            continue
        if expected is not None:
            assert decoded == expected, block.hex()
            agreed += 1
    assert agreed > 500


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # an index beyond the tables
        "ff",  # an index that does not end
        "ffffffffffffffffff7f",  # an index without end
        "7f",  # a literal that does not begin
        "400561",  # a name that goes beyond the block
        "3fe21f",  # a table of 4097 bytes
        "8220",  # a size update behind a field
        "0085ffffffffff00",  # bad Huffman
    ],
)
def test_bad_blocks_are_refused(block: str) -> None:
    with pytest.raises(BadBlock):
        HpackDecoder().decode(bytes.fromhex(block), LIMIT)


def test_a_list_beyond_the_limit_is_dropped_but_its_block_is_decoded() -> None:
    """This is an HPACK bomb: each byte of the block refers to an entry as large as the table."""
    encoder, decoder = peer.Encoder(), HpackDecoder()
    assert decoder.decode(encoder.encode([("x-large", "v" * 4000)]), 8192)
    bomb = b"\xbe" * 60_000 + encoder.encode([("x-last", "entry")])
    assert decoder.decode(bomb, 8192) is None
    assert decoder.decode(encoder.encode([("x-last", "entry")]), 8192) == [(b"x-last", b"entry")]


def test_the_limit_of_a_list_counts_sizes_like_the_table() -> None:
    block = hpack.literal(b"ab", b"cde")
    assert HpackDecoder().decode(block, 37) == [(b"ab", b"cde")]
    assert HpackDecoder().decode(block, 36) is None


def test_the_table_stays_within_its_size() -> None:
    encoder, decoder = peer.Encoder(), HpackDecoder()
    for number in range(2000):
        decoder.decode(
            encoder.encode([("grpc-timeout", f"{number}u"), ("x", "y" * (number % 900))]), LIMIT
        )
    assert decoder._size_bytes <= hpack.TABLE_LIMIT_BYTES
    assert decoder._size_bytes == sum(len(n) + len(v) + 32 for n, v in decoder._table[62:])  # type: ignore[misc]
    assert (
        decoder.decode(b"\x20", LIMIT) == []
        and len(decoder._table) == 62
        and decoder._size_bytes == 0
    )
