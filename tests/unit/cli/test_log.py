"""Tests that errors and warnings are written where callers read them, with the texts that callers
expect."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from pyrunc.cli.log import CommandLog, describe_error
from pyrunc.errors import InvalidArgument, InvalidSpec, KernelError


def test_kernel_errors_are_strerror_in_lower_case() -> None:
    error = KernelError("mount", "'proc' on '/proc'", errno.EPERM, "plan line 17")
    assert (
        describe_error(error) == "mount 'proc' on '/proc': operation not permitted (plan line 17)"
    )


def test_an_error_with_notes_and_newlines_is_one_line() -> None:
    error = InvalidSpec("root.path", "is\nmissing")
    error.add_note("could not undo x: y")
    assert describe_error(error) == "root.path: is; missing; could not undo x: y"


def test_os_errors_name_the_file() -> None:
    assert (
        describe_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"))
        == "'/x': no such file or directory"
    )


def test_a_json_log_has_an_object_per_failure_and_no_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = CommandLog(str(tmp_path / "log"), "json")
    log.warning("not requested")
    log.error('say "it" \\ é')
    (line,) = (tmp_path / "log").read_text().splitlines()
    document = json.loads(line)
    assert (document["level"], document["msg"]) == ("error", 'say "it" \\ é') and document[
        "time"
    ].endswith("Z")
    assert capsys.readouterr().err == 'say "it" \\ é\n'


def test_warnings_go_where_errors_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CommandLog().warning("w")
    assert "level=warning" in capsys.readouterr().err
    CommandLog(level="error").warning("w")
    CommandLog(str(tmp_path / "log")).warning("w")
    assert capsys.readouterr().err == ""
    assert "level=warning" in (tmp_path / "log").read_text()


def test_a_warning_is_one_line_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    CommandLog().warning("a\nb\x1b[31m")
    assert 'msg="a; b\\\\x1b[31m"\n' in capsys.readouterr().err


def test_debug_shows_warnings_in_a_json_log(tmp_path: Path) -> None:
    CommandLog(str(tmp_path / "log"), "json", debug=True).warning("w")
    assert json.loads((tmp_path / "log").read_text())["level"] == "warning"


def test_a_text_log_is_appended_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    CommandLog(f"file:{file}").error('a "b"')
    assert file.read_text().splitlines()[0] == "before"
    assert file.read_text().splitlines()[1].endswith('level=error msg="a \\"b\\""')
    assert capsys.readouterr().err == 'a "b"\n'


def test_without_a_file_the_line_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    CommandLog().error("x")
    assert capsys.readouterr().err.count("x") == 1


def test_a_log_that_cannot_be_opened_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        CommandLog("/nowhere/at/all")


def test_an_unwritable_log_still_reports_the_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    CommandLog("/dev/full").error("why")
    written = capsys.readouterr().err
    assert (
        "cannot write the log '/dev/full': no space left on device" in written and "why" in written
    )


@pytest.mark.parametrize("broken", [{"format": "xml"}, {"level": "loud"}, {"file": "journald:x"}])
def test_unknown_settings_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        CommandLog(**broken)
