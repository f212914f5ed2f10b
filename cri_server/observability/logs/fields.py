"""Fields of a record: `log.info("StartContainer", extra=of(pod="default/web", duration_ms=12.3))`.

They are for programs: the text form writes them as `key=value` behind the message, JSON as keys of
the object, the journal as `PYRUNC_KEY`. A field's name is lower case with underscores, its unit at
the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_ATTRIBUTE = "pyrunc_fields"


def of(**fields: object) -> dict[str, Any]:
    """The `extra` of a logging call. Fields that are None or empty are left out."""
    return {
        _ATTRIBUTE: {
            key: value for key, value in fields.items() if value is not None and value != ""
        }
    }


def found_in(record: logging.LogRecord) -> Mapping[str, object]:
    """The fields of a record; none for a record that was logged without."""
    fields: Mapping[str, object] = getattr(record, _ATTRIBUTE, {})
    return fields


def add_to(record: logging.LogRecord, **fields: object) -> None:
    """Give a record more fields."""
    setattr(record, _ATTRIBUTE, {**found_in(record), **fields})
