"""What a shim and its clients say to each other. One JSON object per packet, descriptors beside it (pyrunc.ipc).

Request {"id": n, "call": name, …} -> {"id": n, "ok": {…}} + descriptors, or {"id": n, "error": …} (pyrunc.errors).
Events {"event": …} go to every connected client, after the fact is on disk. A shim may be older or newer than its client:
unknown fields are ignored, an unknown call is `unsupported`, and `state` tells the shim's protocol version.

| call | parameters | answer |
|---|---|---|
| make_network | | netns_path |
| start_holder | | pid, start_time, netns_path |
| start_container | container | pid, start_time, started_at_ns |
| exec | container, exec, process, stdin, stdout, stderr, tty | pid; tty: [master], else those asked of [stdin, stdout, stderr] |
| kill_exec | exec | |
| stop | container, signal, timeout_s | the exit, when it has come |
| signal | container, signal | |
| attach | container, stdin, stdout, stderr | descriptors as in exec without tty |
| resize | container or exec, width, height | |
| reopen_log | container | |
| state | | protocol, holder, netns_path, containers, execs |
| stop_holder, forget (container), shutdown | | |

Events: exit {container, exit_code, signal, finished_at_ns, oom_killed, reason?, message?}, exec_exit {exec, container,
exit_code}, holder_exit {}.

Files. `shim.sock` and `shim.json` {pid, start_time} in the sandbox's folder; `holder.json` is read there. In a container's
folder `launch.json` and `config.json` are read, `exit.json` {exit_code, signal, finished_at_ns, oom_killed, reason?,
message?} is written before anyone is told.
"""

from __future__ import annotations

PROTOCOL = 1
SOCKET = "shim.sock"
SHIM_RECORD = "shim.json"
HOLDER_RECORD = "holder.json"
LAUNCH_RECORD = "launch.json"
CONFIG = "config.json"
EXIT_RECORD = "exit.json"
LOG = "shim.log"

PINNED = "pinned"
"""In `holder.json`, namespaces.network: the one that the shim has made, ahead or at `make_network` (pyrunc.shim.network)."""

STREAMS = ("stdin", "stdout", "stderr")
START_ERROR = "StartError"
START_ERROR_CODE = 128
OOM_KILLED = "OOMKilled"
