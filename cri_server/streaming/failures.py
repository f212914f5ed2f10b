"""Logs failed sessions. The client gets the message of every error. The log has warnings only for
errors that the client did not cause (`NODE_KINDS`)."""

from __future__ import annotations

import logging

from pyrunc.errors import Error

log = logging.getLogger(__name__)

NODE_KINDS = {
    "kernel",
    "peer",
    "unavailable",
    "resource_exhausted",
    "deadline",
    "unsupported",
    "internal",
}
"""Kinds of `pyrunc.errors` that the client did not cause."""


def log_failure(what: str, error: Error) -> None:
    """Log that the operation `what` failed: as a warning if the error's kind is in `NODE_KINDS`,
    else at debug level."""
    level = logging.WARNING if error.kind in NODE_KINDS else logging.DEBUG
    log.log(level, "%s: %s: %s", what, error.kind, error.message)
