"""CRIU's options for containers of pods, in both directions; fields of
`pyrunc.checkpoint.checkpoint.CriuOptions`.

Connections are not dumped, because their peers go on without the container, and a restored pod has
another address. They are restored closed; listening sockets are restored as they were.
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
