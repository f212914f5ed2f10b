"""CRIU's options for checkpoint and restore of containers in pods; the keys are fields of
`pyrunc.checkpoint.checkpoint.CriuOptions`.

Established TCP connections are not dumped: their peers go on without the container, and a restored
pod has another address. A restored process finds them closed. Listening sockets are restored.
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
