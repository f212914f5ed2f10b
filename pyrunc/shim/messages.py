"""What a shim and its clients say to each other. One JSON object per packet, descriptors beside it (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} + descriptors, or {"id": n, "error": …} (pyrunc.errors).
Events {"event": …} go to every connected client, after the fact is on disk. A shim may be older or newer than its client:
unknown fields are ignored, an unknown call is `unsupported`, and `state` tells the shim's protocol version.

| call | parameters | answer |
|---|---|---|
| make_network | | netns_path |
| start_holder | compiled + descriptors | pid, start_time, netns_path, parts, kept + descriptors |
| start_container | container, compiled + descriptors | pid, start_time, started_at_ns, parts, kept + descriptors |
| keep | container, or none for the holder | kept + descriptors, as from the start |
| adopt_holder, adopt_container (container, sessions: [[pid, start_time], …]) | kept + descriptors | netns_path of the holder |
| exec | container, exec, compiled + descriptors, stdin, stdout, stderr, tty | pid, start_time, parts; tty: [master], else those asked of [stdin, stdout, stderr] |
| kill_exec | exec | |
| stop | container, signal, timeout_s | the exit, when it has come |
| signal | container, signal | |
| attach | container, stdin, stdout, stderr | descriptors as in exec without tty |
| resize | container or exec, width, height | |
| reopen_log | container | |
| state | | protocol, holder, netns_path, containers, execs |
| stop_holder, forget (container), shutdown | | |
| take_pod | sandbox_dir, containers_dir, listening socket | pid: this shim serves that pod as well |

Events: exit {container, exit_code, signal, finished_at_ns, oom_killed, reason?, message?}, exec_exit {exec, container,
exit_code}, holder_exit {}.

`kept` is for a server that outlives this shim: see `pyrunc.shim.kept`.

`parts` are where the time of the start went (`pyrunc.parts`). `compiled` is what a compiler has answered (`compiler.service`), with its descriptors.

Files. `shim.sock` and `shim.json` {pid, start_time} in the sandbox's folder. In a container's folder `state.json` is written when
it runs (`container.state`, with started_at_ns), `exit.json` {exit_code, signal, finished_at_ns, oom_killed, reason?, message?}
before anyone is told; `config.json` is read for poststop hooks.
"""

from __future__ import annotations

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
