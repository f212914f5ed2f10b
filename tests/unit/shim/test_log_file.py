"""Tests the log file on a full disk: all records are whole, and losses are counted and reported."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.errors import KernelError
from pyrunc.shim.log_file import PENDING_LIMIT_BYTES, LogFile

LINE = b"2026-01-31T12:00:00.000000001Z stdout F " + b"x" * 59 + b"\n"


@pytest.fixture
def limited() -> Iterator[None]:
    """Set RLIMIT_FSIZE, which stands for a full disk: write(2) writes up to the limit, then fails
    with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def full_at(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def room_again() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.requirement("11.3")
def test_missing_folders_are_made_and_the_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "pod" / "container" / "0.log"
    for _ in range(2):
        log = LogFile(str(path))
        log.write(LINE)
        log.close()
    assert path.read_bytes() == LINE * 2
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_log_without_a_path_discards_all_records() -> None:
    log = LogFile(None)
    log.write(LINE)
    log.open()
    log.close()
    assert not log.waiting


def test_a_path_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="the container's log"):
        LogFile(str(tmp_path / "file" / "0.log")).open()


def test_a_record_written_in_part_is_cut_off_and_written_again_later(
    tmp_path: Path, limited: None
) -> None:
    path = tmp_path / "0.log"
    log = LogFile(str(path))
    full_at(250)
    log.write(LINE * 4)
    assert path.read_bytes() == LINE * 2  # 250 bytes would hold half of a third one
    log.write(LINE)
    assert log.waiting and path.read_bytes() == LINE * 2
    room_again()
    assert log.retry()
    assert path.read_bytes() == LINE * 5
    log.close()


def test_records_beyond_the_limit_are_dropped_and_counted(tmp_path: Path, limited: None) -> None:
    path = tmp_path / "0.log"
    log = LogFile(str(path))
    full_at(0)
    batch = LINE * 1000
    for _ in range(30):
        log.write(batch)
    assert 0 < log.dropped_bytes < 30 * len(batch)
    written = (30 * len(batch) - log.dropped_bytes) // len(LINE)
    assert written * len(LINE) <= PENDING_LIMIT_BYTES
    room_again()
    log.write(LINE)
    content = path.read_bytes()
    log.close()
    assert content.startswith(LINE * written) and content.endswith(LINE)
    note = content[written * len(LINE) : -len(LINE)]
    assert note.count(b"\n") == 1 and b" stderr F pyrunc: " in note and b"File too large" in note
    assert str((30 - 1) * len(batch) + len(batch) - written * len(LINE)).encode() in note


def test_waiting_records_are_written_to_the_reopened_file(tmp_path: Path, limited: None) -> None:
    path = tmp_path / "0.log"
    log = LogFile(str(path))
    full_at(150)
    log.write(LINE * 2)
    path.rename(tmp_path / "0.log.1")
    room_again()
    log.open()
    log.close()
    assert (tmp_path / "0.log.1").read_bytes() == LINE
    assert path.read_bytes() == LINE


def test_a_failed_reopen_keeps_the_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    log = LogFile(str(folder / "0.log"))
    log.open()
    os.rename(folder, tmp_path / "away")
    folder.write_text("in the way")
    with pytest.raises(KernelError):
        log.open()
    log.write(LINE)
    log.close()
    assert (tmp_path / "away" / "0.log").read_bytes() == LINE


def test_on_waiting_is_called_once_when_records_wait(tmp_path: Path, limited: None) -> None:
    calls: list[bool] = []
    log = LogFile(str(tmp_path / "0.log"), on_waiting=lambda: calls.append(True))
    log.write(LINE)
    assert not calls
    full_at(len(LINE))
    for _ in range(3):
        log.write(LINE)
    assert calls == [True]
    room_again()
    assert log.retry()
    log.close()
