"""CheckpointPod without CRIU: refused requests, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.without_criu import (
    COUNT,
    Code,
    criu,
    goes_on,
    module_server,
    programs,
)

__all__ = ["criu", "module_server", "programs"]


@pytest.fixture
def pod(server: Server) -> tuple[str, list[str]]:
    """Run a pod with two containers that count; return its id and theirs."""
    identifier = server.run_pod()
    ids = []
    for name in ("one", "two"):
        config = server.container_config(["sh", "-c", COUNT], log_path=f"{name}.log")
        config.metadata.name = name
        ids.append(server.launch(identifier, config))
    return identifier, ids


def checkpoint(
    server: Server, pod: str, folder: Path | str, containers: list[str], **options: str
) -> None:
    request = api.CheckpointPodRequest(
        pod_sandbox_id=pod, output_path=str(folder), container_ids=containers, options=options
    )
    server.runtime.CheckpointPod(request, timeout=60)


@pytest.mark.requirement("4.12.1")
def test_invalid_checkpoint_requests_are_refused(
    server: Server, pod: tuple[str, list[str]], criu: Path, tmp_path: Path
) -> None:
    sandbox, containers = pod
    other = server.launch(server.run_pod())
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(empty)

    def code(pod: str, folder: Path | str, ids: list[str], **options: str) -> grpc.StatusCode:
        return code_of(lambda: checkpoint(server, pod, folder, ids, **options))

    for folder in ("", "relative", tmp_path / "none", full / "file", full, tmp_path / "link"):
        assert code(sandbox, folder, containers) == Code.INVALID_ARGUMENT, folder
    assert code(sandbox, empty, []) == Code.INVALID_ARGUMENT
    assert code(sandbox, empty, [containers[0]] * 2) == Code.INVALID_ARGUMENT
    assert code(sandbox, empty, [containers[0], other]) == Code.INVALID_ARGUMENT
    assert code(sandbox, empty, ["0" * 64]) == Code.NOT_FOUND
    assert code("0" * 64, empty, containers) == Code.NOT_FOUND
    assert code(sandbox, empty, containers, mode="fast") == Code.INVALID_ARGUMENT
    server.stop_container(containers[1])
    assert code(sandbox, empty, containers) == Code.FAILED_PRECONDITION
    assert not list(empty.iterdir()) and (full / "file").read_bytes() == b"mine"


def test_a_checkpoint_of_a_pod_without_criu_is_refused(
    server: Server, pod: tuple[str, list[str]], tmp_path: Path
) -> None:
    sandbox, containers = pod
    assert "criu is not in $PATH" in message_of(
        lambda: checkpoint(server, sandbox, tmp_path, containers)
    )


@pytest.mark.requirement("4.12.1")
def test_a_failed_checkpoint_of_a_pod_leaves_no_archive(
    server: Server, pod: tuple[str, list[str]], criu: Path, tmp_path: Path
) -> None:
    """When CRIU fails for the first of two containers, both continue."""
    sandbox, containers = pod
    noted = tmp_path / "noted"
    criu.write_text(
        f"#!/bin/sh\nfor g in {_groups(server)}; do read frozen < $g; echo $frozen; done > {noted};"
        " exit 1\n"
    )
    folder = tmp_path / "out"
    folder.mkdir()
    assert "criu" in message_of(lambda: checkpoint(server, sandbox, folder, containers))
    assert noted.read_text().split() == ["1", "1"]  # both were frozen
    assert not list(folder.iterdir())
    for container in containers:
        goes_on(server, container)


def _groups(server: Server) -> str:
    """Return the paths of all containers' `cgroup.freeze` files, separated by spaces."""
    groups = []
    for container in server.containers():
        request = api.ContainerStatusRequest(container_id=container.id, verbose=True)
        pid = json.loads(server.runtime.ContainerStatus(request).info["info"])["pid"]
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        (group,) = (line.removeprefix("0::") for line in lines if line.startswith("0::"))
        root = next(
            p for p in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if p.is_dir()
        )
        groups.append(f"{root}{group}/cgroup.freeze")
    return " ".join(groups)
