"""Which failures of sessions the log has: the client is told of each, the node's owner of those
that he can mend."""

from __future__ import annotations

import logging

from pyrunc.errors import Error

log = logging.getLogger(__name__)

OF_THE_NODE = {
    "kernel",
    "peer",
    "unavailable",
    "resource_exhausted",
    "deadline",
    "unsupported",
    "internal",
}
"""Kinds of errors that the client did not cause (`pyrunc.errors`)."""


def note(what: str, error: Error) -> None:
    """Log that `what` failed: a warning when the node is to blame, else for debugging."""
    level = logging.WARNING if error.kind in OF_THE_NODE else logging.DEBUG
    log.log(level, "%s: %s: %s", what, error.kind, error.message)
