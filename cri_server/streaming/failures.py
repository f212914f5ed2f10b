"""Logs failed sessions. The client gets the message of every error. The log has warnings only for
errors that the client did not cause."""

from __future__ import annotations

import logging

from pyrunc.errors import Error

log = logging.getLogger(__name__)

CLIENT_KINDS = {"invalid_argument", "invalid_spec", "not_found", "already_exists", "wrong_state"}
"""Kinds of `pyrunc.errors` for errors that the client causes."""


def log_failure(what: str, error: Error) -> None:
    """Log that the operation `what` failed: at debug level if the error's kind is in
    `CLIENT_KINDS`, else as a warning."""
    level = logging.DEBUG if error.kind in CLIENT_KINDS else logging.WARNING
    log.log(level, "%s: %s: %s", what, error.kind, error.message)
