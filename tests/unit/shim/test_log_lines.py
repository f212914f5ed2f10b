"""Tests the CRI log format without I/O: in whatever pieces output arrives, readers get the same
bytes back."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrunc.shim.log_lines import PARTIAL_BYTES, LogLines, time_stamp

STAMP = b"2026-01-31T12:00:00.000000001Z"
RECORD = re.compile(rb"(\S+) (stdout|stderr) ([FP]) (.*)", re.DOTALL)


def records(output: bytes) -> list[tuple[bytes, bytes]]:
    """Return (tag, content) of each record; fail if a line is no record."""
    if not output:
        return []
    assert output.endswith(b"\n")
    lines = []
    for line in output[:-1].split(b"\n"):
        match = RECORD.fullmatch(line)
        assert match, line[:100]
        lines.append((match[3], match[4]))
    return lines


def read_back(output: bytes) -> bytes:
    """Return the bytes that a reader makes of a log: tag P continues a line, tag F ends it."""
    return b"".join(content + (b"\n" if tag == b"F" else b"") for tag, content in records(output))


def write(portions: list[bytes], stream: str = "stdout") -> bytes:
    lines = LogLines(stream)
    return b"".join(lines.feed(portion, STAMP) for portion in portions) + lines.finish(STAMP)


@pytest.mark.requirement("11.1")
def test_lines_become_full_records() -> None:
    assert write([b"one\ntwo\n\n"]) == b"".join(
        STAMP + b" stdout F " + x for x in (b"one\n", b"two\n", b"\n")
    )


def test_records_name_their_stream() -> None:
    assert write([b"x\n"], "stderr") == STAMP + b" stderr F x\n"


@pytest.mark.requirement("11.2")
def test_an_unterminated_last_line_becomes_a_partial_record() -> None:
    assert write([b"one\ntail"]) == STAMP + b" stdout F one\n" + STAMP + b" stdout P tail\n"


def test_nothing_is_written_before_a_line_is_whole() -> None:
    lines = LogLines("stdout")
    assert lines.feed(b"half", STAMP) == b""
    assert lines.feed(b" and half\nmore", STAMP) == STAMP + b" stdout F half and half\n"


@pytest.mark.parametrize("length", [0, 1, PARTIAL_BYTES - 1, PARTIAL_BYTES])
def test_a_line_up_to_the_limit_is_a_single_record(length: int) -> None:
    assert [(tag, len(content)) for tag, content in records(write([b"x" * length + b"\n"]))] == [
        (b"F", length)
    ]


@pytest.mark.requirement("11.2")
@pytest.mark.parametrize(
    "length", [PARTIAL_BYTES + 1, 2 * PARTIAL_BYTES, 2 * PARTIAL_BYTES + 1, 10**6]
)
def test_a_line_above_the_limit_is_cut_into_partial_records(length: int) -> None:
    lines = records(write([b"before\n", b"x" * length + b"\nafter\n"]))
    tags = [tag for tag, _ in lines]
    lengths = [len(content) for _, content in lines[1:-1]]
    assert lines[0] == (b"F", b"before") and lines[-1] == (b"F", b"after")
    assert set(tags[1:-2]) == {b"P"} and tags[-2:] == [b"F", b"F"]
    assert (
        set(lengths[:-1]) == {PARTIAL_BYTES}
        and 0 < lengths[-1] <= PARTIAL_BYTES
        and sum(lengths) == length
    )


@pytest.mark.requirement("11.2")
def test_output_without_a_newline_is_written_at_the_limit() -> None:
    lines = LogLines("stdout")
    for _ in range(100):
        lines.feed(b"x" * 10_000, STAMP)
        assert len(lines._tail) <= PARTIAL_BYTES


def test_records_do_not_depend_on_the_size_of_reads() -> None:
    content = b"a\n\nbc\n" + b"x" * (PARTIAL_BYTES + 5) + b"\ny" * 3 + b"z" * PARTIAL_BYTES
    assert write([content[i : i + 1] for i in range(len(content))]) == write([content])


# Pieces that make interesting lines: short ones, newlines, and lengths around the cut.
piece = st.one_of(
    st.binary(max_size=20),
    st.just(b"\n"),
    st.integers(PARTIAL_BYTES - 2, PARTIAL_BYTES + 2).map(lambda n: b"x" * n),
    st.just(b"y" * (3 * PARTIAL_BYTES)),
)


@pytest.mark.requirement("11.1")
@settings(max_examples=300, deadline=None)
@given(st.lists(piece, max_size=12), st.lists(st.integers(0, 200_000), max_size=12))
def test_a_log_has_the_same_bytes_however_the_output_was_split(
    pieces: list[bytes], cuts: list[int]
) -> None:
    content = b"".join(pieces)
    at = sorted({min(cut, len(content)) for cut in cuts} | {0, len(content)})
    portions = [content[a:b] for a, b in itertools.pairwise(at)]
    output = write(portions)
    assert read_back(output) == content
    assert all(len(line) <= PARTIAL_BYTES for _, line in records(output))
    assert all(tag == b"P" for tag, line in records(output)[:-1] if len(line) > PARTIAL_BYTES)


@pytest.mark.requirement("11.1")
def test_the_time_stamp_is_rfc_3339_with_nanoseconds() -> None:
    assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", time_stamp())
