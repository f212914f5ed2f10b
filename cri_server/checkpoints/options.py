"""What CRIU is told for a container of a pod, in both directions; by the names of
`pyrunc.checkpoint.checkpoint.Choices`.

Connections are with peers that go on without the container, at an address that a restored pod has
no more: they are not dumped, and come back closed. Listeners come back as they were.
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
    "file_locks": True,
    "lazy_pages": False,
    "link_remap": False,
    "auto_dedup": False,
}
