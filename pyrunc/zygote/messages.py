"""The messages between the server and a zygote: one JSON object per packet (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} or {"id": n, "error": …} (pyrunc.errors),
as between server and shim. `Cancel` has the id 0 and gets no answer. The zygote's first message is
`ZygoteReady`.

The zygote does not read `arguments`, which are for the called function.
"""

from __future__ import annotations

from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message

STDIO_OF_JOB = 4  # stdin, stdout, stderr, result socket come before the job's own descriptors
UNANSWERED = 0


class ZygoteReady(Record):
    """The zygote's first message: its pid, or the error that prevents its start."""

    ready: int | None = None
    error: Message | None = None


class Fork(Request):
    """Start a child that outlives server and zygote. The request's descriptors are passed to the
    child. The answer is a `Forked`."""

    call = "fork"
    function: str
    arguments: Message


class Forked(Record):
    """The pid of the new child."""

    pid: int


class RunJob(Request):
    """Run a job. The answer is a `JobEnded` when the job ends. `timeout_s`: None for no deadline.

    The request's descriptors are stdin, stdout, stderr, the result socket, and then those that
    `function` gets.
    """

    call = "run"
    function: str
    arguments: Message
    environment: dict[str, str]
    timeout_s: float | None = None


class JobEnded(Record):
    """The end of a job. `exit_code`: 128 + n for signal n; `timed_out`: the job was killed at its
    deadline."""

    exit_code: int
    timed_out: bool


class Cancel(Request):
    """Kill the job whose request had the number `run`."""

    call = "cancel"
    run: int


class Outcome(Record):
    """The one message that a job may send on its result socket: `ok` with descriptors for the
    server, or an error."""

    ok: bool = False
    error: Message | None = None


class FromWorker(Record):
    """Fields in each answer of a worker, which is a job that serves many requests
    (`cri_server.zygote.workers`).

    `last`: the worker must get no further request, because its memory has grown.
    """

    last: bool = False
