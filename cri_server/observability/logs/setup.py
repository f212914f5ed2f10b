"""Configures logging: to stderr as text or JSON, or to the journal."""

from __future__ import annotations

import logging
import sys

from cri_server.observability.logs.formats import Json, TextFormatter
from cri_server.observability.logs.journald import SOCKET, Journal
from cri_server.observability.logs.rate_limit import RateLimit
from pyrunc.errors import WrongState


def configure(level: str, form: str, limit_per_s: float) -> None:
    """Replace the root logger's handlers.

    - `form`: text, json or journald. Raises WrongState for journald if journald does not run.
    - `limit_per_s`: how many messages of one kind may pass per second; 0: any number.
    """
    handler = _handler(form)
    if limit_per_s:
        handler.addFilter(RateLimit(limit_per_s))
    # Do not collect values that no format shows (logging HOWTO, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    if sys.version_info >= (3, 12):
        logging.logAsyncioTasks = False
    if form != "journald":  # the journal alone has the source line
        logging._srcfile = None  # type: ignore[attr-defined]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _handler(form: str) -> logging.Handler:
    if form == "journald":
        try:
            return Journal()
        except OSError as error:
            raise WrongState(
                f"server.log_format: journald does not listen at {SOCKET}: {error.strerror}"
            ) from None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else TextFormatter())
    return handler
