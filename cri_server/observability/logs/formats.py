"""The formats of log messages: a line of text, or a JSON object.

Times are RFC 3339 in UTC with milliseconds. Control characters in messages are escaped, so that the
name of an image or pod cannot forge a line. Only a traceback spans several lines; in JSON it is a
string.
"""

from __future__ import annotations

import json
import logging
import re
import time
from functools import lru_cache

import msgspec

from cri_server.observability.logs.fields import fields_of
from pyrunc.errors import VISIBLE

_PLAIN = re.compile(r"[\w./:@%+,\[\]-]+")


def time_of(record: logging.LogRecord) -> str:
    """Format the message's time in UTC, such as `2026-11-22T21:50:00.123Z`."""
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def message_of(record: logging.LogRecord) -> str:
    """Format the message's text as one line, with control characters escaped."""
    return record.getMessage().translate(VISIBLE)


class TextFormatter(logging.Formatter):
    """Formats a message as `TIME LEVEL logger: message key=value key="a value with spaces"`."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{time_of(record)} {record.levelname} {record.name}: {message_of(record)}"
        for key, value in fields_of(record).items():
            line += f" {key}={_quoted(str(value))}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class Json(logging.Formatter):
    """Formats a message as `{"time", "level", "logger", "message", …fields, "traceback"}`. Numbers
    stay numbers."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message_of(record),
            **fields_of(record),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(content, enc_hook=str).decode()


def _quoted(text: str) -> str:
    """Quote a value if needed, as in logfmt."""
    if _PLAIN.fullmatch(text):
        return text
    return json.dumps(text.translate(VISIBLE), ensure_ascii=False)
