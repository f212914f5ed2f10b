"""CRIU's options for checkpoint and restore of containers in pods. The keys are arguments of
`pyrunc.checkpoint.checkpoint.CriuOptions`; flags that are not listed are off.

Listening sockets are restored. Established TCP connections are closed in the restored container,
because its pod has another address.
"""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "manage_cgroups_mode": "",
    "empty_ns": [],
    "tcp_close": True,
    # Otherwise CRIU refuses to dump a process that holds a file lock (criu(8), --file-locks).
    "file_locks": True,
}
