"""Fields of log messages: `log.info("StartContainer", extra=of(pod="default/web",
duration_ms=12.3))`.

The text format appends them as `key=value`, JSON has them as keys, the journal as `PYRUNC_KEY`. A
field's name is lower case with underscores, its unit at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_ATTRIBUTE = "pyrunc_fields"


def of(**fields: object) -> dict[str, Any]:
    """Return the `extra` argument for a logging call that adds these fields to the message. Fields
    that are None or empty are omitted."""
    values = {key: value for key, value in fields.items() if value is not None and value != ""}
    return {_ATTRIBUTE: values}


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields of a log message; empty if it has none."""
    fields: Mapping[str, object] = getattr(record, _ATTRIBUTE, {})
    return fields


def add_to(record: logging.LogRecord, **fields: object) -> None:
    """Add fields to a log message."""
    setattr(record, _ATTRIBUTE, {**fields_of(record), **fields})
