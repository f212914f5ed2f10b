"""What a person sees: tables, ages, and a pod as the kernel has it: processes, namespaces, cgroup."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client
from pyrunc.errors import VISIBLE

SHORT = 12
NAMESPACES = ("net", "ipc", "uts", "pid", "mnt", "cgroup", "user")
PAUSED = "paused"
POD_STATES = {api.SANDBOX_READY: "ready", api.SANDBOX_NOTREADY: "not ready"}
STATES = {
    api.CONTAINER_CREATED: "created",
    api.CONTAINER_RUNNING: "running",
    api.CONTAINER_EXITED: "exited",
    api.CONTAINER_UNKNOWN: "unknown",
}


def printable(text: str) -> str:
    """Text of a container's or an image's making, without control characters: it moves no cursor
    and renames no window."""
    return text.translate(VISIBLE)


def age(since_ns: int) -> str:
    """`5s`, `3m`, `2h`, `4d`."""
    seconds = max(0, time.time_ns() - since_ns) // 1_000_000_000
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def size(count: int) -> str:
    """`1.9MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}GB"


def pod_info(client: Client, pod: str) -> dict[str, Any]:
    """The server's verbose words about a pod."""
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    return _info(client.runtime("PodSandboxStatus", request).info)


def container_info(client: Client, container: str) -> dict[str, Any]:
    """The server's verbose words about a container."""
    request = api.ContainerStatusRequest(container_id=container, verbose=True)
    return _info(client.runtime("ContainerStatus", request).info)


def _info(info: Any) -> dict[str, Any]:
    found = json.loads(info.get("info", "{}"))
    return found if isinstance(found, dict) else {}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def processes(named: Sequence[tuple[str, int]]) -> list[str]:
    """`shim 12, pause 14, c: sleep 3600 (20)` as lines: what each pid runs, with its resident
    memory."""
    lines = []
    for name, pid in named:
        try:
            words = _read(f"/proc/{pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
            command = printable(words.decode(errors="replace")[:60])
            resident = int(_read(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            command, resident = "(gone)", 0
        lines.append(f"{pid:>8}  {name:<20} {size(resident):>7}  {command}")
    return lines


def namespaces(pid: int) -> str:
    """The namespaces of a process: `net new, ipc new, … user host's`."""
    words = []
    for kind in NAMESPACES:
        try:
            same = (
                os.stat(f"/proc/{pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino
            )
        except OSError:
            return "(gone)"
        words.append(f"{kind} {'host' if same else 'own'}")
    return ", ".join(words)


def cgroup(pid: int) -> str:
    """The v2 group of a process."""
    try:
        for line in _read(f"/proc/{pid}/cgroup").decode().splitlines():
            if line.startswith("0::"):
                return line[3:]
    except OSError:
        pass
    return "(gone)"
