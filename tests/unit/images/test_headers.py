"""Tests that tar headers in every format that `tarfile` writes are read as `tarfile` reads them."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cri_server.images.layers import tar_headers
from cri_server.images.layers.inflate import BadLayer, TarStream

KINDS = {
    tarfile.REGTYPE: tar_headers.FILE,
    tarfile.DIRTYPE: tar_headers.DIRECTORY,
    tarfile.SYMTYPE: tar_headers.SYMLINK,
    tarfile.LNKTYPE: tar_headers.HARDLINK,
    tarfile.CHRTYPE: tar_headers.CHARACTER,
    tarfile.BLKTYPE: tar_headers.BLOCK_DEVICE,
    tarfile.FIFOTYPE: tar_headers.FIFO,
}


@contextmanager
def stream_of(data: bytes) -> Iterator[TarStream]:
    fd = os.memfd_create("tar", os.MFD_CLOEXEC)
    try:
        with io.FileIO(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield TarStream(fd)
    finally:
        os.close(fd)


def read(data: bytes) -> list[tuple[tar_headers.TarMember, bytes]]:
    with stream_of(data) as stream:
        entries = []
        for entry in tar_headers.members(stream):
            entries.append(
                (entry, stream.read_exact(entry.stored) if entry.kind == tar_headers.FILE else b"")
            )
        return entries


WORDS = some.text(
    some.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=40
)
PATHS = (
    some.lists(WORDS, min_size=1, max_size=12).map("/".join).filter(lambda p: not p.endswith("/"))
)


@some.composite
def member(draw: some.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(draw(PATHS))
    info.type = draw(some.sampled_from(list(KINDS)))
    info.mode = draw(some.integers(0, 0o7777))
    info.uid, info.gid = draw(some.integers(0, 2**31)), draw(some.integers(0, 2**31))
    info.mtime = draw(some.integers(0, 2**33))
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = draw(PATHS)
    if info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        info.devmajor = draw(some.integers(0, 4095))
        info.devminor = draw(some.integers(0, 2**20 - 1))
    content = draw(some.binary(max_size=2000)) if info.type == tarfile.REGTYPE else b""
    info.size = len(content)
    return info, content


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@settings(max_examples=150, deadline=None)
@given(written=some.lists(member(), max_size=6))
def test_tars_of_tarfile_are_read(kind: int, written: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for info, content in written:
            tar.addfile(info, io.BytesIO(content))
    entries = read(buffer.getvalue())
    assert len(entries) == len(written)
    for (entry, data), (info, content) in zip(entries, written, strict=True):
        assert entry.name.rstrip(b"/") == info.name.encode() and entry.kind == KINDS[info.type]
        assert (entry.mode, entry.uid, entry.gid, entry.size, data) == (
            info.mode,
            info.uid,
            info.gid,
            info.size,
            content,
        )
        assert entry.mtime_ns == info.mtime * 10**9 and entry.link == info.linkname.encode()
        assert (entry.major, entry.minor) == (info.devmajor, info.devminor)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"0", 0),
        (b"1.5", 1_500_000_000),
        (b"1.123456789", 1_123_456_789),
        (b"1.1234567899", 1_123_456_789),
        (b"-1.5", -1_500_000_000),
        (b"-1", -1_000_000_000),
        (b"1700000000.000000001", 1_700_000_000_000_000_001),
        (b".5", 500_000_000),
    ],
)
def test_times_keep_their_nanoseconds(text: bytes, expected: int) -> None:
    assert tar_headers._time(text) == expected


@pytest.mark.parametrize("text", [b"", b"a", b"1.a", b"1e5", b"nan", b"--1", b"9" * 30, b"1.-5"])
def test_invalid_times_are_refused(text: bytes) -> None:
    with pytest.raises(BadLayer):
        tar_headers._time(text)


@pytest.mark.parametrize("number", [0, 1, 0o7777777, 2**21, 2**33, 2**40, 2**61])
def test_numbers_in_octal_and_base_256_are_read(number: int) -> None:
    field = bytes(tarfile.itn(number, 12, tarfile.GNU_FORMAT))  # type: ignore[attr-defined]
    assert tar_headers._number(field, "size") == number


def test_negative_numbers_are_accepted_only_as_times() -> None:
    field = bytes(tarfile.itn(-5, 12, tarfile.GNU_FORMAT))  # type: ignore[attr-defined]
    assert tar_headers._number(field, "mtime", signed=True) == -5
    with pytest.raises(BadLayer, match="size is out of range"):
        tar_headers._number(field, "size")


@settings(max_examples=300, deadline=None)
@given(data=some.binary(max_size=3000))
def test_noise_is_refused_or_read_without_a_crash(data: bytes) -> None:
    try:
        read(data)
    except BadLayer:
        pass


def test_headers_read_byte_by_byte_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("n" * 300)
        info.size = 700
        tar.addfile(info, io.BytesIO(b"x" * 700))
    whole = read(buffer.getvalue())
    monkeypatch.setattr("cri_server.images.layers.inflate._INPUT_BYTES", 1)
    assert read(buffer.getvalue()) == whole
