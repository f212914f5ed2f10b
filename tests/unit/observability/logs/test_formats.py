"""Tests log records as text and JSON: fields, quoting, and names with line breaks."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from cri_server.observability.logs import fields
from cri_server.observability.logs.formats import Json, TextFormatter


def record(message: str, *arguments: object, **more: object) -> logging.LogRecord:
    log_record = logging.makeLogRecord(
        {
            "name": "cri_server.x",
            "levelname": "INFO",
            "levelno": logging.INFO,
            "msg": message,
            "args": arguments,
        }
    )
    log_record.created, log_record.msecs = 1795384203.25, 250.0
    for key, value in fields.of(**more).items():
        setattr(log_record, key, value)
    return log_record


def test_text_lines_have_the_fields() -> None:
    line = TextFormatter().format(
        record("StartContainer", pod="default/web", duration_ms=1.5, error='no "x"', step=None)
    )
    assert (
        line == "2026-11-22T21:50:03.250Z INFO cri_server.x: StartContainer pod=default/web"
        ' duration_ms=1.5 error="no \\"x\\""'
    )


@pytest.mark.parametrize("nasty", ["a\nb", "a\r\x1b[2Jb", "a\x9bb", "a b=c", "a\x7f", ""])
def test_a_value_with_special_characters_stays_a_single_word(nasty: str) -> None:
    line = TextFormatter().format(record("did %s", nasty, name=nasty, last="end"))
    assert line.endswith("last=end") and len(line.splitlines()) == 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line)
    object_ = json.loads(Json().format(record("did %s", nasty, name=nasty)))
    assert object_.get("name", "") == nasty and len(object_["message"].splitlines()) == 1


def test_json_fields_keep_their_numbers() -> None:
    document = json.loads(
        Json().format(record("%s failed", "PullImage", duration_ms=12.3, exit_code=0))
    )
    assert document == {
        "time": "2026-11-22T21:50:03.250Z",
        "level": "info",
        "logger": "cri_server.x",
        "message": "PullImage failed",
        "duration_ms": 12.3,
        "exit_code": 0,
    }


def test_a_traceback_follows_the_line_or_is_a_json_string() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        failed = record("not expected")
        failed.exc_info = sys.exc_info()
    assert TextFormatter().format(failed).endswith("ValueError: odd")
    assert json.loads(Json().format(failed))["traceback"].endswith("ValueError: odd")
