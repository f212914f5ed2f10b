"""The messages between a shim and its clients: one JSON object per packet, with descriptors as
SCM_RIGHTS (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} + descriptors, or {"id": n, "error": …}
(pyrunc.errors). Events {"event": …} are sent to every connected client. A container's `Exit` is
sent after its exit.json was written. A shim may be older or newer than its client: unknown fields
are ignored, an unknown call gets the error `unsupported`, and the answer to `state` has the shim's
protocol version.

`cri_server.pod.client` sends the requests, and `pyrunc.shim.serve` reads them. An answer's `parts`
are the stages of the call with their times (`Timings.noted`). If the request has `timed`, `parts`
also has each operation of a launch.

Files. The shim's folder and the folder of each sandbox that the shim serves have a `shim.sock` and
a `shim.json` {pid, start_time}. The socket in the shim's folder takes the calls `take_pod`, `shim`
and `end_shim`; a sandbox's socket takes all other calls. In a container's folder the shim writes
`state.json` when the container runs (`container.state`, with started_at_ns), and `exit.json`
{exit_code, signal, finished_at_ns, oom_killed, reason?, message?} before any client is notified.
For poststop hooks, the shim reads `config.json` in that folder.
"""

from __future__ import annotations

import time

from pyrunc.compile.bind_source import BindSource
from pyrunc.records import Record, Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath, Id
PROTOCOL = 3
SOCKET = "shim.sock"
SHIM_RECORD = "shim.json"
STATE_RECORD = "state.json"
CONFIG = "config.json"
EXIT_RECORD = "exit.json"
LOG = "shim.log"
LOCK = "shim.lock"

PINNED = "pinned"
"""The value of namespaces.network in `pause.json` for a pod whose network namespace the shim makes
when it takes the pod (pyrunc.shim.network)."""

STREAMS = ("stdin", "stdout", "stderr")
UNKNOWN_REASON, UNKNOWN_CODE = "Unknown", 255
"""The reason and the exit code of an exit that was not observed, as in containerd."""
LOST_CODE = "the container's shim was lost, and with it the exit code"
START_ERROR = "StartError"
START_ERROR_CODE = 128
OOM_KILLED = "OOMKilled"


# ---- the arguments of a new shim


class Arguments(Record):
    """The arguments of a new shim. The shim also gets a listening socket, which is bound in
    `folder`.

    - `version`: the server's version, which `ShimInfo` reports
    - `oom_score_adj`: the value for processes whose configuration sets none
    - `starter`: a class (`module:class`) that replaces the shim's `Starter`
    - `keeper`: the folder of the keeper (`pyrunc.keeper.client`)
    """

    folder: AbsolutePath
    version: str = ""
    oom_score_adj: int = 0
    starter: str | None = None
    keeper: AbsolutePath | None = None


# ---- the exit of a container


class Exit(Record):
    """How a container ended. The shim writes it to `exit.json`, and then sends it as the answer to
    `Stop` and, with `container`, as an event.

    - `exit_code`: 128 + n for signal n
    - `reason`: OOMKilled, StartError or Unknown; None in all other cases
    """

    exit_code: int
    signal: int | None
    finished_at_ns: int
    oom_killed: bool = False
    reason: str | None = None
    message: str | None = None
    container: Id | None = None

    @classmethod
    def unknown(cls, finished_at_ns: int, message: str = "") -> Exit:
        """Return the exit of a container whose end was not observed."""
        return cls(UNKNOWN_CODE, None, finished_at_ns, reason=UNKNOWN_REASON, message=message)

    @classmethod
    def of_failed_start(cls, message: str) -> Exit:
        """Return the exit of a container that could not be started."""
        return cls(START_ERROR_CODE, None, time.time_ns(), reason=START_ERROR, message=message)

    @property
    def cri_reason(self) -> str:
        """Return the `reason` for the container's CRI status. kubelet shows it, and acts on some
        reasons."""
        if self.oom_killed:
            return OOM_KILLED
        return self.reason or ("Error" if self.exit_code else "Completed")


# ---- events


class ExecExited(Record):
    """The process of an exec session has ended."""

    exec: Id
    container: Id
    exit_code: int


class PauseExited(Record):
    """The pod's pause process has ended. `exit_code`: None when it is unknown."""

    exit_code: int | None = None


Event = Exit | ExecExited | PauseExited
EVENTS: dict[str, type[Event]] = {
    "exit": Exit,
    "exec_exit": ExecExited,
    "holder_exit": PauseExited,
}
_EVENT_NAMES = {kind: name for name, kind in EVENTS.items()}


def message_of(event: Event) -> Message:
    """Return the JSON object of an event."""
    return {"event": _EVENT_NAMES[type(event)], **event.to_fields()}


def event_of(message: Mapping[str, Any]) -> Event | None:
    """Convert a JSON object to its event. None for an event that this version does not know. Raises
    InvalidArgument."""
    kind = EVENTS.get(str(message.get("event")))
    return None if kind is None else kind.of(message)


# ---- the keeper's entries, from which another shim takes over a pod whose shim was killed
#
# The reading ends of a container's output, pipes or a terminal's master, stay open in the keeper,
# so that no output is lost while no shim lives. A pipe's writing end is never stored: the pipe's
# reader would never see the end of file.
#
# A killed shim loses exec sessions, attached clients, the stdin of a container without a terminal,
# and output that it had read but not written: the beginning of an unfinished line, and the output
# of the 50 microseconds between read(2) and write(2). A shim that ends by `EndShim` has written
# this output.


class StoredPause(Record):
    """The data that the keeper stores for a pause process. The descriptors stored with it are the
    pidfd, the network namespace if `network`, and a mount for each name in `mounts`."""

    pid: int
    start_time: int
    group: dict[str, str] | None
    network: bool
    mounts: Sequence[str]

    @staticmethod
    def name_of(sandbox_id: str) -> str:
        """Return the name under which the keeper stores a pod's pause process."""
        return f"pod/{sandbox_id}"


class StoredContainer(Record):
    """The data that the keeper stores for a running container. The descriptors stored with it are
    the pidfd of the first process and, for each name in `outputs`, the descriptor from which the
    shim reads this stream."""

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

    @staticmethod
    def name_of(container_id: str) -> str:
        """Return the name under which the keeper stores a container."""
        return f"container/{container_id}"


# ---- requests, and their answers after them


class Done(Record):
    """An empty reply."""


class NetworkNamespace(Record):
    """The answer to `TakePod` and `TakeOverPause`. `netns_path`: the path of the pod's network
    namespace; None if the shim does not have it open."""

    netns_path: str | None = None


class StartPause(Request):
    """Start the pod's pause process, which pause.json describes."""

    call = "start_holder"
    timed: bool = False


class PauseStarted(Record):
    """The answer to `StartPause`: the pause process runs. `netns_path`: the path of its network
    namespace."""

    pid: int
    start_time: int
    netns_path: str | None = None
    parts: Sequence[Any] = ()


class CreateContainer(Request):
    """Compile the container from config.json and launch.json in its folder, and make its cgroup. If
    the container was created before but not started, it is compiled anew.

    - `images`: index files of the mounted images
    - `opened`: host paths of the bind sources that the server has opened
    - `sources`: facts about bind sources, by host path

    The request's descriptors are a mount for each of `images`, then one for each of `opened`.
    """

    call = "create_container"
    container: Id
    images: Sequence[str] = ()
    timed: bool = False
    sources: dict[str, BindSource] | None = None
    opened: Sequence[str] = ()


class ContainerCreated(Record):
    """The answer to `CreateContainer`: the container can be started."""

    parts: Sequence[Any] = ()


class DropContainer(Request):
    """Forget a container that was created and will not be started. Its cgroup stays. Unknown
    containers are ignored."""

    call = "drop_container"
    container: Id


class StartContainer(Request):
    """Start a container that was created. Raises NotFound if it was not created, AlreadyExists if
    it has been started already, WrongState if the pod's pause process has ended."""

    call = "start_container"
    container: Id


class ContainerStarted(Record):
    """The answer to `StartContainer`: the container's first process runs."""

    pid: int
    start_time: int
    started_at_ns: int
    parts: Sequence[Any] = ()


class TakeOverPause(Request):
    """Take over the pause process of a shim that has ended, with the data and descriptors that the
    keeper has stored for it. The answer is a `NetworkNamespace`."""

    call = "adopt_holder"


class TakeOverContainer(Request):
    """Take over a container of a shim that has ended, with the data and descriptors that the keeper
    has stored for it.

    - `sessions`: pid and start time of the first process of each exec session. The shim kills these
      sessions.
    - `stdin_once`: close stdin when the first client's input ends

    The request may have one descriptor, the writing end of the container's stdin.
    """

    call = "adopt_container"
    container: Id
    sessions: Sequence[Sequence[int]] = ()
    stdin_once: bool = False


class StartExec(Request):
    """Run `process`, an OCI process object, in a container."""

    call = "exec"
    container: Id
    exec: Id
    process: Message
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False
    timed: bool = False
    exit_within_ms: int = 0
    """How long the shim waits for the exit before it answers. Only for a session that has stdout
    and stderr, and neither stdin nor a terminal."""


class ExecStarted(Record):
    """The answer to `StartExec`: the session's process runs. The answer's descriptors are the
    terminal's master, or a pipe for each requested stream, in the order stdin, stdout, stderr.

    If the process has ended within `StartExec.exit_within_ms` and its output is short, the answer
    has `exit_code` and no descriptors, and no `ExecExited` follows. `output`: stdout and stderr;
    each character is a byte (Latin-1)."""

    pid: int
    start_time: int = 0
    parts: Sequence[Any] = ()
    exit_code: int | None = None
    output: Sequence[str] = ()


class KillExec(Request):
    """Kill the session's process and its descendants. For some seconds after the exit of the
    process, its descendants can still be killed. Unknown sessions are ignored."""

    call = "kill_exec"
    exec: Id


class Stop(Request):
    """Send `signal` to the container, and SIGKILL after `timeout_s`. The answer is the `Exit`, when
    the container has exited."""

    call = "stop"
    container: Id
    signal: int
    timeout_s: float


class Attach(Request):
    """Attach to the requested streams of the container. The answer's descriptors are a pipe for
    each stream, in the order stdin, stdout, stderr. A terminal has no stderr."""

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
    """Open the container's log path again, after kubelet has renamed the log file, and write to the
    new file."""

    call = "reopen_log"
    container: Id


class GetState(Request):
    """Request a `PodState`."""

    call = "state"


class PauseState(Record):
    """The pause process in a `PodState`."""

    pid: int
    start_time: int
    running: bool
    netns_path: str | None = None


class ContainerState(Record):
    """A container in a `PodState`. `exit`: None while the container runs. `pid`: 0 while the
    container is being started, and after a failed start."""

    id: Id
    pid: int
    start_time: int
    started_at_ns: int
    running: bool
    exit: Exit | None = None


class PodState(Record):
    """The answer to `GetState`: the pod's pause process, containers and exec sessions.

    - `protocol`: the shim's protocol version
    - `holder`: the pause process, also after its end
    - `execs`: running exec sessions
    - `netns_path`: the network namespace that the shim has open, also without a pause process
    """

    protocol: int
    pid: int
    holder: PauseState | None
    containers: Sequence[ContainerState]
    execs: Sequence[str]
    netns_path: str | None = None

    @property
    def pause(self) -> PauseState | None:
        """Return the pause process, also after its end; None if none was started."""
        return self.holder

    @property
    def netns(self) -> str | None:
        """Return the path of the pod's network namespace; None if the shim reports none. A shim of
        version 0.1.0 reports it only with the pause process."""
        return self.netns_path or (self.holder.netns_path if self.holder else None)

    @property
    def pause_running(self) -> bool:
        """Return whether the pause process runs."""
        return self.holder is not None and self.holder.running


class StopPause(Request):
    """End the pause process."""

    call = "stop_holder"


class Forget(Request):
    """Forget a container that has ended. Raises WrongState while the container runs. Unknown
    containers are ignored."""

    call = "forget"
    container: Id


class Shutdown(Request):
    """Stop serving the pod. Raises WrongState while its pause process or a container runs."""

    call = "shutdown"


class TakePod(Request):
    """Serve a pod. The request's descriptor is the pod's listening socket. The answer is a
    `NetworkNamespace`.

    - `network`: the pod does not use the host's network, so it needs a network namespace.
    - `deadline_s`: a time (CLOCK_MONOTONIC). From then on the shim refuses the request, because
      the server may have sent it to another shim.
    """

    call = "take_pod"
    sandbox_dir: AbsolutePath
    containers_dir: AbsolutePath
    network: bool = False
    deadline_s: float | None = None


class GetShim(Request):
    """Request a `ShimInfo`."""

    call = "shim"


class EndShim(Request):
    """End the shim without loss of output, so that another shim can take its pods over. The pods'
    processes run on.

    The shim first logs all output that it has read, also unfinished lines. It then answers and
    ends. A shim that cannot write a log, because the disk is full for example, answers with
    ResourceExhausted and continues.
    """

    call = "end_shim"


class ShimInfo(Record):
    """The shim's process and versions. `version`: the version of the server that started the
    shim."""

    protocol: int
    version: str
    pid: int
    start_time: int


class ShimRecord(Record):
    """The content of `shim.json`: it identifies the shim's process."""

    pid: int
    start_time: int
