"""What a shim and its clients say to each other. One JSON object per packet, descriptors beside it (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} + descriptors, or {"id": n, "error": …} (pyrunc.errors).
Events {"event": …} go to every connected client, after the fact is on disk. A shim may be older or newer than its client:
unknown fields are ignored, an unknown call is `unsupported`, and `state` tells the shim's protocol version.

A call is a `Request`, `pyrunc.shim.serve` reads it and `pyrunc.shim.client` sends it. `parts` are where the time of a start went
(`pyrunc.parts`). `compiled` is what a compiler has answered (`compiler.messages`), with its descriptors.

Files. `shim.sock` and `shim.json` {pid, start_time} in the sandbox's folder. In a container's folder `state.json` is written when
it runs (`container.state`, with started_at_ns), `exit.json` {exit_code, signal, finished_at_ns, oom_killed, reason?, message?}
before anyone is told; `config.json` is read for poststop hooks.
"""

from __future__ import annotations

from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath, Id
PROTOCOL = 2
SOCKET = "shim.sock"
SHIM_RECORD = "shim.json"
STATE_RECORD = "state.json"
CONFIG = "config.json"
LAUNCH = "launch.json"
EXIT_RECORD = "exit.json"
LOG = "shim.log"

PINNED = "pinned"
"""In `holder.json`, namespaces.network: the one that the shim has made, ahead or at `make_network` (pyrunc.shim.network)."""

STREAMS = ("stdin", "stdout", "stderr")
UNKNOWN_REASON, UNKNOWN_CODE = "Unknown", 255
"""Containerd's, for an exit that nobody saw."""
LOST_CODE = "the container's shim was lost, and with it the exit code"
START_ERROR = "StartError"
START_ERROR_CODE = 128
OOM_KILLED = "OOMKilled"


# ---- what it is forked with


class Arguments(Record):
    """Of a new shim, with its listening socket. `starter` (`module:class`) replaces the runtime library. `keeper`: the folder of the
    keeper (`pyrunc.keeper.client`)."""

    sandbox_dir: AbsolutePath
    containers_dir: AbsolutePath
    starter: str | None = None
    keeper: AbsolutePath | None = None


class Prepared(Record):
    """What a shim has made ahead. `network`: the descriptor of a network namespace."""

    network: int | None = None


# ---- how something ended


class Exit(Record):
    """How a container ended: `exit.json`, the answer to `Stop`, and most of `Exited`. `exit_code` is 128 + n for signal n; `reason` is
    set for OOMKilled and StartError."""

    exit_code: int
    signal: int | None
    finished_at_ns: int
    oom_killed: bool = False
    reason: str | None = None
    message: str | None = None


# ---- events


class Exited(Record):
    """A container has ended, and `exit.json` is written. The fields of `Exit`."""

    container: Id
    exit_code: int
    signal: int | None
    finished_at_ns: int
    oom_killed: bool = False
    reason: str | None = None
    message: str | None = None

    @property
    def exit(self) -> Exit:
        return Exit(
            self.exit_code, self.signal, self.finished_at_ns, self.oom_killed, self.reason, self.message
        )

    @classmethod
    def with_exit(cls, container: str, end: Exit) -> Exited:
        return cls(
            container,
            end.exit_code,
            end.signal,
            end.finished_at_ns,
            end.oom_killed,
            end.reason,
            end.message,
        )


class ExecExited(Record):
    """The process of an exec session has ended."""

    exec: Id
    container: Id
    exit_code: int


class HolderExited(Record):
    """The pod's pause process has ended. None: nobody saw how."""

    exit_code: int | None = None


Event = Exited | ExecExited | HolderExited
EVENTS: dict[str, type[Event]] = {"exit": Exited, "exec_exit": ExecExited, "holder_exit": HolderExited}
_EVENT_NAMES = {kind: name for name, kind in EVENTS.items()}


def message_of(event: Event) -> Message:
    """The event as it travels."""
    return {"event": _EVENT_NAMES[type(event)], **event.to_fields()}


def event_of(message: Mapping[str, Any]) -> Event | None:
    """The event that `message_of` made; None for one that this version does not know. Raises InvalidArgument."""
    kind = EVENTS.get(str(message.get("event")))
    return None if kind is None else kind.of(message)


# ---- what the keeper stores (`pyrunc.shim.kept`)


class KeptHolder(Record):
    """A holder. With it go its pidfd, the network namespace if it has one, and its mounts by these names."""

    pid: int
    start_time: int
    group: dict[str, str] | None
    network: bool
    mounts: Sequence[str]


class KeptContainer(Record):
    """A container that runs. With it go the pidfd of its first process and what its `outputs` are read from."""

    pid: int
    start_time: int
    group: dict[str, str]
    poststop: bool
    started_at_ns: int
    terminal: bool
    stdin: bool
    log_path: str | None
    log_directory: str
    outputs: Sequence[str]
    other: bool = False


# ---- requests, and their answers after them


class Nothing(Record):
    """The answer of a call that has none but that it was done."""


class MakeNetwork(Request):
    """Have the pod's network namespace made, if it is not there."""

    call = "make_network"


class Network(Record):
    """`netns_path`: of the network namespace that the shim pins, if there is one."""

    netns_path: str | None


class StartHolder(Request):
    """Start the pod's pause process, with the descriptors of the launch (`compiler.messages.CompiledPause`)."""

    call = "start_holder"
    compiled: Message


class HolderStarted(Record):
    """A pause process."""

    pid: int
    start_time: int
    netns_path: str | None = None
    parts: Sequence[Any] = ()


class StartContainer(Request):
    """Start a container, with the descriptors of the launch (`compiler.messages.CompiledContainer`)."""

    call = "start_container"
    container: Id
    compiled: Message


class ContainerStarted(Record):
    """A container's first process."""

    pid: int
    start_time: int
    started_at_ns: int
    parts: Sequence[Any] = ()


class AdoptHolder(Request):
    """Go on with the pause process of a shim that was lost, which the keeper has. The answer is a `Network`."""

    call = "adopt_holder"


class AdoptContainer(Request):
    """Go on with a container of a shim that was lost, which the keeper has. `sessions`: pid and start time of each exec session, which
    are ended."""

    call = "adopt_container"
    container: Id
    sessions: Sequence[Sequence[int]] = ()


class StartExec(Request):
    """Run a process in a container, with the descriptors of the launch (`compiler.messages.CompiledExec`)."""

    call = "exec"
    container: Id
    exec: Id
    compiled: Message
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False


class ExecStarted(Record):
    """With a terminal's master, or pipes to those of stdin, stdout and stderr that were asked for."""

    pid: int
    start_time: int = 0
    parts: Sequence[Any] = ()


class KillExec(Request):
    """Kill the session's process and its descendants. One that is gone is fine."""

    call = "kill_exec"
    exec: Id


class Stop(Request):
    """Send the signal, SIGKILL after `timeout_s`. The answer is the `Exit`, when it has come."""

    call = "stop"
    container: Id
    signal: int
    timeout_s: float


class Signal(Request):
    """Send a signal to the container's first process."""

    call = "signal"
    container: Id
    signal: int


class Attach(Request):
    """Pipes to the container's streams: descriptors as those of `ExecStarted`."""

    call = "attach"
    container: Id
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False


class Resize(Request):
    """Set the size of the terminal of a container, or of an exec session, in characters."""

    call = "resize"
    width: int
    height: int
    container: Id | None = None
    exec: Id | None = None


class ReopenLog(Request):
    """Write to a new file at the log's path."""

    call = "reopen_log"
    container: Id


class GetState(Request):
    """Everything that the shim knows: a `State`."""

    call = "state"


class HolderState(Record):
    """The pause process."""

    pid: int
    start_time: int
    running: bool
    netns_path: str | None = None


class ContainerState(Record):
    """A container; `exit` once it has ended."""

    id: Id
    pid: int
    start_time: int
    started_at_ns: int
    running: bool
    exit: Exit | None = None


class State(Record):
    """`netns_path`: the namespace that it pins; `execs`: sessions that run. `protocol` is the shim's."""

    protocol: int
    pid: int
    holder: HolderState | None
    containers: Sequence[ContainerState]
    execs: Sequence[str]
    netns_path: str | None = None


class StopHolder(Request):
    """End the pause process."""

    call = "stop_holder"


class Forget(Request):
    """Drop a container that has ended. An unknown one is fine."""

    call = "forget"
    container: Id


class Shutdown(Request):
    """End the pod's shim, in which nothing runs any more."""

    call = "shutdown"


class TakePod(Request):
    """Serve another pod as well, on the listening socket that goes with this."""

    call = "take_pod"
    sandbox_dir: AbsolutePath
    containers_dir: AbsolutePath


class Taken(Record):
    """`pid`: the shim's."""

    pid: int


class ShimRecord(Record):
    """`shim.json`."""

    pid: int
    start_time: int
