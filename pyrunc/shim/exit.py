"""How a container ended, and that it is on disk before anyone hears of it."""

from __future__ import annotations

import sys

from pyrunc import atomic_file
from pyrunc.shim import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Exit:
    """The fields of `exit.json`, of the `exit` event and of the answer to `stop`."""

    __slots__ = ("exit_code", "finished_at_ns", "message", "oom_killed", "reason", "signal")

    def __init__(
        self,
        exit_code: int,
        signal: int | None,
        finished_at_ns: int,
        *,
        oom_killed: bool = False,
        reason: str = "",
        message: str = "",
    ) -> None:
        self.exit_code, self.signal, self.finished_at_ns = exit_code, signal, finished_at_ns
        self.oom_killed, self.reason, self.message = oom_killed, reason, message

    def fields(self) -> dict[str, Any]:
        """As a JSON object; what is empty is left out."""
        fields = {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "finished_at_ns": self.finished_at_ns,
            "oom_killed": self.oom_killed,
        }
        reason = {"reason": self.reason} if self.reason else {}
        return fields | reason | ({"message": self.message} if self.message else {})

    def write(self, directory: str) -> None:
        """Put the record into the container's folder. A failure is reported on stderr: the exit must be told all the same."""
        try:
            atomic_file.write_json(f"{directory}/{messages.EXIT_RECORD}", self.fields())
        except OSError as error:
            print(f"pyrunc-shim: no exit record in {directory}: {error}", file=sys.stderr)
