"""Logs the problems of the machine when the server starts."""

from __future__ import annotations

import logging

import msgspec

from cri_server.config import Config
from cri_server.doctor.job import PRINT_PROBLEMS
from cri_server.zygote.client import Zygote
from pyrunc.errors import Error

log = logging.getLogger(__name__)

OUTPUT_LIMIT_BYTES = 1 << 20


async def log_problems(zygote: Zygote, config: Config) -> None:
    """Run the doctor's read-only checks in a job, and log the problems that they find."""
    try:
        result = await zygote.run(
            PRINT_PROBLEMS,
            stdin=msgspec.json.encode(config),
            output_limit_bytes=OUTPUT_LIMIT_BYTES,
        )
    except Error as error:
        log.warning("cannot examine this machine: %s", error)
        return
    if result.exit_code:
        words = result.stderr.decode("utf-8", "replace").strip()
        log.warning("cannot examine this machine (exit code %d): %s", result.exit_code, words)
        return
    for level, text in msgspec.json.decode(result.stdout, type=list[tuple[int, str]]):
        log.log(level, "%s", text)
