"""Tests records in the journal's native protocol, sent to a socket of the test."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.observability.logs import fields
from cri_server.observability.logs.journald import SEALS, Journal


def parse(data: bytes) -> dict[str, str]:
    """Return the fields of a datagram in journald's native protocol."""
    fields = {}
    while data:
        head, _, rest = data.partition(b"\n")
        if b"=" in head:
            key, _, value = head.partition(b"=")
        else:
            (size,) = struct.unpack_from("<Q", rest)
            key, value, rest = head, rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields[key.decode()] = value.decode()
        data = rest
    return fields


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        yield listener


@pytest.fixture
def log(journal: socket.socket) -> Iterator[logging.Logger]:
    logger = logging.Logger("cri_server.test")
    handler = Journal(journal.getsockname())
    logger.addHandler(handler)
    yield logger
    handler.close()


def test_journal_records_have_the_fields(journal: socket.socket, log: logging.Logger) -> None:
    log.warning("%s failed", "StartContainer", extra=fields.of(pod="default/web", duration_ms=1.5))
    received = parse(journal.recv(1 << 16))
    assert received["MESSAGE"] == "StartContainer failed" and received["PRIORITY"] == "4"
    assert received["PYRUNC_POD"] == "default/web" and received["PYRUNC_DURATION_MS"] == "1.5"
    assert received["SYSLOG_IDENTIFIER"] == "pyrunc-cri" and received["LOGGER"] == "cri_server.test"
    assert (
        received["CODE_FILE"] == __file__
        and received["CODE_FUNC"] == "test_journal_records_have_the_fields"
    )


def test_a_value_of_several_lines_forges_no_field(
    journal: socket.socket, log: logging.Logger
) -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        log.exception("bad", extra=fields.of(error="x\nPRIORITY=0\n"))
    received = parse(journal.recv(1 << 16))
    assert received["PRIORITY"] == "3" and received["PYRUNC_ERROR"] == "x\nPRIORITY=0\n"
    assert received["MESSAGE"].startswith("bad\nTraceback") and received["MESSAGE"].endswith(
        "ValueError: odd"
    )


def test_a_long_record_comes_as_a_sealed_memfd(journal: socket.socket, log: logging.Logger) -> None:
    text = "x" * (4 << 20)  # more than a socket's buffer holds
    log.info(text)
    data, control, _, _ = journal.recvmsg(16, socket.CMSG_SPACE(4))
    assert data == b""
    (memory,) = array.array("i", control[0][2])
    try:
        assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) == SEALS
        fields = parse(os.pread(memory, os.fstat(memory).st_size, 0))
    finally:
        os.close(memory)
    assert fields["MESSAGE"] == text


def test_records_are_dropped_when_the_journal_does_not_read(
    journal: socket.socket, log: logging.Logger
) -> None:
    for number in range(3000):  # net.unix.max_dgram_qlen is a few hundred at most
        log.info("line %d", number)
    journal.setblocking(False)
    taken = 0
    try:
        while parse(journal.recv(1 << 16)):
            taken += 1
    except BlockingIOError:
        pass
    assert 0 < taken < 3000
    log.info("later")
    fields = parse(journal.recv(1 << 16))
    assert fields["MESSAGE"] == "later" and fields["PYRUNC_LOST_BEFORE"] == str(3000 - taken)
    log.info("and on")
    assert "PYRUNC_LOST_BEFORE" not in parse(journal.recv(1 << 16))


def test_a_restarted_journal_gets_records_again(tmp_path: Path) -> None:
    path, logger = str(tmp_path / "socket"), logging.Logger("x")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as first:
        first.bind(path)
        handler = Journal(path)
        logger.addHandler(handler)
    Path(path).unlink()
    logger.info("lost")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as second:
        second.bind(path)
        logger.info("found")
        fields = parse(second.recv(1 << 16))
    handler.close()
    assert fields["MESSAGE"] == "found" and fields["PYRUNC_LOST_BEFORE"] == "1"


def test_a_missing_journal_leaks_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Journal(str(tmp_path / "none"))
    assert len(os.listdir("/proc/self/fd")) == before and sys.exc_info()[0] is None
