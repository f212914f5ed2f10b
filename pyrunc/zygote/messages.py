"""The messages between the server and a zygote: one JSON object per packet (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} or {"id": n, "error": …} (pyrunc.errors),
as between server and shim. `Cancel` has no answer, and number 0. The zygote's first message is
`Ready`.

The function that is called and its caller agree on `arguments`; the zygote passes them on.
"""

from __future__ import annotations

from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

STDIO_OF_JOB = 4  # stdin, stdout, stderr, result socket come before the job's own descriptors
UNANSWERED = 0


class Ready(Record):
    """The zygote's first message: its pid, or why it cannot start."""

    ready: int | None = None
    error: Message | None = None


class Fork(Request):
    """Start a child that outlives server and zygote, with the descriptors that come along. Answered
    with a `Forked`."""

    call = "fork"
    function: str
    arguments: Message


class Forked(Record):
    """The child."""

    pid: int


class Run(Request):
    """Run a job, with stdin, stdout, stderr, its result socket and its own descriptors.
    Answered with an `Ended` then. The deadline is `timeout_s` from now, None for none."""

    call = "run"
    function: str
    arguments: Message
    environment: dict[str, str]
    timeout_s: float | None = None


class Ended(Record):
    """a job's end. `exit_code` is 128 + n for signal n; `timed_out`: it was killed at its
    deadline."""

    exit_code: int
    timed_out: bool


class Cancel(Request):
    """Kill the job whose request had the number `run`."""

    call = "cancel"
    run: int


class Outcome(Record):
    """The one message that a job may send on its result socket: `ok`, with the descriptors that
    it hands over, or an error."""

    ok: bool = False
    error: Message | None = None


class FromWorker(Record):
    """Part of a worker's answer. `last`: the worker's memory has grown, so it must get no further
    request."""

    last: bool = False
