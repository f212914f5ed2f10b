"""CheckpointContainer without CRIU: refused requests, and nothing left behind.

tests/vm/inside/test_server_checkpoint.py has the tests with CRIU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.spec import groups
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.without_criu import (
    COUNT,
    IMAGES,
    SLOW,
    Code,
    archive,
    criu,
    goes_on,
    launch_counting,
    module_server,
    programs,
    started,
)
from tests.support.processes import wait_until

__all__ = ["criu", "module_server", "programs"]


def checkpoint(server: Server, container: str, location: Path | str, timeout: int = 0) -> None:
    request = api.CheckpointContainerRequest(
        container_id=container, location=str(location), timeout=timeout
    )
    server.runtime.CheckpointContainer(request, timeout=60)


@pytest.fixture
def counting(server: Server) -> str:
    return launch_counting(server)


@pytest.mark.requirement("4.11.1")
def test_a_checkpoint_without_criu_is_refused(
    server: Server, counting: str, tmp_path: Path
) -> None:
    assert (
        code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar"))
        == Code.FAILED_PRECONDITION
    )
    assert "criu is not in $PATH" in message_of(
        lambda: checkpoint(server, counting, tmp_path / "a.tar")
    )
    goes_on(server, counting)
    assert not list(tmp_path.iterdir())


def test_invalid_locations_are_refused(
    server: Server, counting: str, criu: Path, tmp_path: Path
) -> None:
    for location in (
        "",
        "relative.tar",
        tmp_path,
        f"{tmp_path}/x/",
        "/no/such/folder/x.tar",
        "/x\0",
    ):
        assert (
            code_of(lambda location=location: checkpoint(server, counting, location))
            == Code.INVALID_ARGUMENT
        )  # type: ignore[misc]
    good = tmp_path / "a.tar"
    assert code_of(lambda: checkpoint(server, counting, good, -1)) == Code.INVALID_ARGUMENT
    assert code_of(lambda: checkpoint(server, "0" * 64, good)) == Code.NOT_FOUND
    created = server.create(server.run_pod())
    assert code_of(lambda: checkpoint(server, created, good)) == Code.FAILED_PRECONDITION
    server.stop_container(counting)
    assert code_of(lambda: checkpoint(server, counting, good)) == Code.FAILED_PRECONDITION


def users_of_its_own() -> api.NamespaceOption:
    mapping = [api.IDMapping(host_id=200_000, container_id=0, length=65_536)]
    users = api.UserNamespace(mode=api.POD, uids=mapping, gids=mapping)
    return api.NamespaceOption(pid=api.CONTAINER, userns_options=users)


def test_a_container_with_a_user_namespace_cannot_be_checkpointed(
    server: Server, criu: Path, tmp_path: Path
) -> None:
    pod_config, config = server.pod_config(), server.container_config(["sh", "-c", COUNT])
    for context in (pod_config.linux.security_context, config.linux.security_context):
        context.namespace_options.CopyFrom(users_of_its_own())
    pod = server.run_pod(pod_config)
    container = server.launch(pod, config)
    assert wait_until(lambda: "count" in server.output(container, "ls", "/"), 30)
    assert (
        code_of(lambda: checkpoint(server, container, tmp_path / "a.tar"))
        == Code.FAILED_PRECONDITION
    )
    assert "has a user namespace" in message_of(
        lambda: checkpoint(server, container, tmp_path / "a.tar")
    )
    goes_on(server, container)
    assert not list(tmp_path.iterdir())
    again = server.container_config(image=api.ImageSpec(image=archive(tmp_path / "a.tar", *IMAGES)))
    again.metadata.name = "again"
    again.linux.security_context.namespace_options.CopyFrom(users_of_its_own())
    before = sorted(p.name for p in (server.root / "containers").iterdir())
    assert code_of(lambda: server.create(pod, again)) == Code.INVALID_ARGUMENT
    assert "into a pod with a user namespace" in message_of(lambda: server.create(pod, again))
    assert sorted(p.name for p in (server.root / "containers").iterdir()) == before


@pytest.mark.requirement("4.11.1")
def test_a_failed_checkpoint_changes_neither_container_nor_archive(
    server: Server, counting: str, criu: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.tar").write_bytes(b"of before")
    assert "criu" in message_of(lambda: checkpoint(server, counting, tmp_path / "a.tar"))
    goes_on(server, counting)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"] and (
        tmp_path / "a.tar"
    ).read_bytes() == b"of before"


@pytest.mark.requirement("4.11.1")
def test_a_checkpoint_that_takes_too_long_fails(
    server: Server, counting: str, criu: Path, tmp_path: Path
) -> None:
    """The caller gets the error after the timeout. When CRIU ends later, the container continues,
    and no file is left."""
    criu.write_text(SLOW.format(folder=tmp_path))
    assert (
        code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar", 1))
        == Code.DEADLINE_EXCEEDED
    )
    assert "a checkpoint of container" in message_of(
        lambda: checkpoint(server, counting, tmp_path / "b.tar")
    ) or "is paused" in message_of(lambda: checkpoint(server, counting, tmp_path / "b.tar"))
    (tmp_path / "go").touch()
    work = server.root / "containers" / counting / "checkpoint"
    assert wait_until(lambda: not work.exists(), 60)
    goes_on(server, counting)
    assert [p.name for p in tmp_path.iterdir()] == ["go"]


def test_a_server_killed_during_a_checkpoint_leaves_nothing_frozen(
    criu: Path, programs: Path, tmp_path: Path
) -> None:
    """The next server thaws the container and removes the unfinished checkpoint."""
    criu.write_text(SLOW.format(folder=tmp_path))
    with started(programs) as server:
        counting = launch_counting(server)
        assert (
            code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar", 1))
            == Code.DEADLINE_EXCEEDED
        )
        group = Path(groups.place(_cgroup(server, counting), counting).directory)
        assert "frozen 1" in (group / "cgroup.events").read_text()
        server.kill()
        server.start(PATH=str(programs))
        goes_on(server, counting)
        assert not list(tmp_path.iterdir())


def _cgroup(server: Server, container: str) -> str:
    request = api.ContainerStatusRequest(container_id=container, verbose=True)
    return str(json.loads(server.runtime.ContainerStatus(request).info["info"])["cgroupsPath"])
