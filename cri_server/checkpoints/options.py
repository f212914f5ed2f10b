"""CRIU's options for checkpoint and restore of containers in pods. The keys are fields of
`pyrunc.checkpoint.checkpoint.CriuOptions`.

Listening sockets are restored. Established TCP connections are closed in the restored container,
because its pod has another address.
"""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, Any] = {
    "manage_cgroups_mode": "",
    "empty_ns": [],
    "tcp_established": False,
    "tcp_close": True,
    "ext_unix_sk": False,
    "shell_job": False,
    # CRIU refuses to dump a process that holds a file lock otherwise (criu(8), --file-locks).
    "file_locks": True,
    "lazy_pages": False,
    "link_remap": False,
    "auto_dedup": False,
}
