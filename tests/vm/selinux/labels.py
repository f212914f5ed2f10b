"""Reads labels as the kernel shows them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cri_server.api import api_pb2 as api
from cri_server.security.selinux.context import SelinuxContext, parse
from tests.cri.server_harness import Server


def read(text: bytes) -> SelinuxContext:
    label = parse(text.decode().rstrip("\0\n"))
    assert label is not None, text
    return label


def label(pid: int) -> SelinuxContext:
    return read(Path(f"/proc/{pid}/attr/current").read_bytes())


def file_label(pid: int, path: str) -> SelinuxContext:
    """Return the label of a file, looked up in the root of the process."""
    return read(os.getxattr(f"/proc/{pid}/root{path}", "security.selinux", follow_symlinks=False))


def pids(server: Server, container: str) -> tuple[int, int]:
    """Return the container's first process, and its pod's pause process."""
    state = json.loads((server.state / "containers" / container / "state.json").read_text())
    sandbox = (
        server.runtime.ListContainers(
            api.ListContainersRequest(filter=api.ContainerFilter(id=container))
        )
        .containers[0]
        .pod_sandbox_id
    )
    request = api.PodSandboxStatusRequest(pod_sandbox_id=sandbox, verbose=True)
    pause = json.loads(server.runtime.PodSandboxStatus(request).info["info"])["pid"]
    return int(state["pid"]), int(pause)
