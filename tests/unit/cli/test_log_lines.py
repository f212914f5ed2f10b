"""Tests the reading of a log with rotated files: from its beginning, from its end, and during
rotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.cli.streams.log_lines import Log
from cri_server.containers import log_rotation
from pyrunc.errors import NotFound

FILES = (".20260101-100000", ".20260101-100001", "")


def record(number: int) -> bytes:
    return b"2026-01-01T10:00:00.%09dZ stdout F %d\n" % (number, number)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a rotated log of nine records in three files, with unrelated files beside them; return
    the path of the current file."""
    path = tmp_path / "main.log"
    for at, ending in enumerate(FILES):
        Path(f"{path}{ending}").write_bytes(b"".join(record(3 * at + n) for n in range(3)))
    for other in ("main.log.20260101-090000.gz", "main.log.1", "main.log.20260101-1", "remain.log"):
        (tmp_path / other).write_bytes(record(99))
    return path


def numbers(log: Log) -> list[int]:
    return [int(entry.content) for entry in log.new()]


def test_a_log_begins_with_its_oldest_rotated_file(path: Path) -> None:
    log = Log(str(path))
    assert numbers(log) == list(range(9)) and numbers(log) == []
    log.close()


@pytest.mark.parametrize("count", range(12))
def test_the_last_records_may_come_from_several_files(path: Path, count: int) -> None:
    log = Log(str(path))
    log.seek_last(count)
    assert numbers(log) == list(range(9))[max(0, 9 - count) :]
    log.close()


def test_a_log_is_followed_over_several_rotations(path: Path) -> None:
    log = Log(str(path))
    log.seek_last(1)
    assert numbers(log) == [8]
    with path.open("ab") as file:
        file.write(record(9))
    for number, second in ((10, 5), (11, 6)):
        path.rename(f"{path}.20260101-10000{second}")
        path.write_bytes(record(number))
    assert numbers(log) == [9, 10, 11]
    path.rename(f"{path}.20260101-100007")
    assert numbers(log) == [], "the writer has not opened another one yet"
    path.write_bytes(record(12))
    assert numbers(log) == [12]
    log.close()


def test_a_rotated_file_that_was_removed_leaves_a_gap_and_repeats_nothing(path: Path) -> None:
    log = Log(str(path))
    assert numbers(log) == list(range(9))
    target = log_rotation.move(str(path), 0)
    assert target
    Path(target).unlink()
    path.write_bytes(record(20))
    assert numbers(log) == [20]
    log.close()


def test_rotated_files_are_read_without_a_current_file(path: Path) -> None:
    # As after a kill of the server between the two steps of a rotation; the container has ended.
    path.unlink()
    log = Log(str(path))
    assert numbers(log) == list(range(6))
    log.close()
    for ending in FILES[:2]:
        Path(f"{path}{ending}").unlink()
    with pytest.raises(NotFound, match="has not been started"):
        Log(str(path))


def test_a_log_is_moved_at_most_once_a_second_and_can_be_moved_back(path: Path) -> None:
    assert log_rotation.move(str(path), 1 << 20) is None, "it is short"
    target = log_rotation.move(str(path), 10)
    assert target and target in log_rotation.rotated(str(path)) and not path.exists()
    assert log_rotation.move(str(path), 10) == "", "only the new file is missing"
    log_rotation.move_back(str(path), target)
    assert path.exists() and len(log_rotation.rotated(str(path))) == 2


def test_only_the_oldest_files_are_removed(path: Path) -> None:
    log_rotation.remove_oldest(str(path), 2)
    assert {each.name for each in path.parent.iterdir()} == {
        *("main.log", "main.log.20260101-100001", "main.log.1", "main.log.20260101-1"),
        *("main.log.20260101-090000.gz", "remain.log"),
    }


def test_only_regular_files_are_rotated(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert log_rotation.move(str(tmp_path / "link"), 0) is None
    assert log_rotation.move(str(tmp_path / "nothing"), 0) is None


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("100 2", (100, 2)),
        ("100 1", None),
        ("100", None),
        ("", None),
        ("x 3", None),
        ("9" * 30 + " 3", None),
    ],
)
def test_malformed_limits_are_refused(text: str, limits: tuple[int, int] | None) -> None:
    assert log_rotation.limits({log_rotation.ANNOTATION: text}) == limits
    assert log_rotation.limits({}) is None
