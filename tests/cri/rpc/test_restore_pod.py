"""RestorePod without CRIU: pods that are created, refused requests, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import tarfile
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import pods
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.without_criu import (
    IMAGES,
    Code,
    archive,
    criu,
    module_server,
    programs,
)

EMPTY_TAR = bytes(10240)
__all__ = ["criu", "module_server", "programs"]


def saved(folder: Path, *names: str, **options: Any) -> Path:
    """Write a pod's checkpoint, with an archive for each container in `names`; return its
    folder."""
    folder.mkdir()
    ids = {name: f"{number:064x}" for number, name in enumerate(names)}
    for name, identifier in ids.items():
        archive(folder / f"{identifier}.tar", *IMAGES, name=name)
    (folder / pods.OPTIONS).write_text(json.dumps({"version": 1, "containers": ids, **options}))
    return folder


def request(
    server: Server, folder: Path | str, *names: str, **changes: Any
) -> api.RestorePodRequest:
    configs = []
    for name in names:
        config = server.container_config(log_path=f"{name}.log")
        config.metadata.name = name
        configs.append(config)
    return api.RestorePodRequest(
        checkpoint_path=str(folder),
        config=server.pod_config(),
        container_configs=configs,
        **changes,
    )


def refused(server: Server, restore_request: api.RestorePodRequest) -> tuple[grpc.StatusCode, str]:
    """Assert that RestorePod fails and leaves no pod; return the error's code and text."""
    pods = (
        code_of(lambda: server.runtime.RestorePod(restore_request, timeout=60)),
        message_of(lambda: server.runtime.RestorePod(restore_request, timeout=60)),
    )
    assert not server.pods() and not list((server.state / "sandboxes").iterdir())
    assert not [p for p in (server.root / "containers").iterdir() if p.is_dir()]
    return pods


@pytest.mark.requirement("4.12.2")
def test_all_containers_are_created_and_none_runs(
    server: Server, criu: Path, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "saved", "one", "two")
    with tarfile.open(folder / pods.SHM, "w") as tar:
        member = tarfile.TarInfo("shared")
        member.size = 6
        tar.addfile(member, io.BytesIO(b"memory"))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    answer = server.runtime.RestorePod(request(server, folder, "two", "one"), timeout=60)
    assert [restored.name for restored in answer.restored_containers] == ["two", "one"]
    for restored in answer.restored_containers:
        status = server.status(restored.container_id)
        assert status.state == api.CONTAINER_CREATED and status.metadata.name == restored.name
    assert server.pod_status(answer.pod_sandbox_id).state == api.SANDBOX_READY
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before
    other = server.launch(answer.pod_sandbox_id)
    assert server.output(other, "cat", "/dev/shm/shared") == "memory"


@pytest.mark.requirement("4.12.2")
def test_invalid_restore_requests_are_refused(server: Server, criu: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", "one", "two")
    for restore_request, code, why in (
        (request(server, folder, "one"), Code.INVALID_ARGUMENT, "the checkpoint has one, two"),
        (
            request(server, folder, "one", "three"),
            Code.INVALID_ARGUMENT,
            "container_configs names one, three",
        ),
        (request(server, folder, "one", "one"), Code.INVALID_ARGUMENT, "two containers are named"),
        (
            request(server, folder, "one", "two", options={"x": "y"}),
            Code.INVALID_ARGUMENT,
            "options",
        ),
        (request(server, "relative", "one"), Code.INVALID_ARGUMENT, "is not an absolute path"),
        (request(server, tmp_path, "one"), Code.NOT_FOUND, "is not a pod's checkpoint"),
        (request(server, tmp_path / "none", "one"), Code.NOT_FOUND, "is not a pod's checkpoint"),
        (
            request(server, folder, "one", "two", runtime_handler="none"),
            Code.INVALID_ARGUMENT,
            "handler",
        ),
    ):
        assert (
            refused(server, restore_request)[0] == code
            and why in refused(server, restore_request)[1]
        ), refused(server, restore_request)


@pytest.mark.requirement("4.12.2")
def test_a_failed_restore_leaves_no_pod(server: Server, criu: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", "one", "two")
    (folder / f"{1:064x}.tar").write_bytes(b"no archive")
    code, message = refused(server, request(server, folder, "one", "two"))
    assert code == Code.INVALID_ARGUMENT and "the checkpoint's archive" in message
    (folder / f"{1:064x}.tar").unlink()
    assert refused(server, request(server, folder, "one", "two"))[0] == Code.NOT_FOUND


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"containers": {"one": "../../etc/passwd"}}',
        '{"containers": {"one": 3}}',
        '{"containers": {}, "version": 9}',
    ],
)
def test_hostile_options_are_refused(
    server: Server, criu: Path, tmp_path: Path, content: str
) -> None:
    folder = saved(tmp_path / "saved", "one")
    (folder / pods.OPTIONS).write_text(content)
    assert refused(server, request(server, folder, "one"))[0] == Code.INVALID_ARGUMENT
    (folder / pods.OPTIONS).unlink()
    (folder / pods.OPTIONS).symlink_to("/etc/passwd")
    assert refused(server, request(server, folder, "one"))[0] == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
@pytest.mark.parametrize("name", [pods.OPTIONS, pods.SHM, f"{0:064x}.tar"])
def test_a_hostile_folder_is_refused(
    server: Server, criu: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """If a file of a pod's checkpoint is a pipe, an endless device, a folder, or a link to a file
    of the host, RestorePod fails within 30 s and leaves nothing."""
    folder = saved(tmp_path / "saved", "one")
    place = folder / name
    place.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(place)
            stack.callback(os.close, os.open(place, os.O_RDWR))  # a writer that writes nothing
        elif kind == "device":
            os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to("/etc/passwd")
        begin = time.monotonic()
        code, message = refused(server, request(server, folder, "one"))
        assert code == Code.INVALID_ARGUMENT and (str(folder) in message or "archive" in message), (
            code,
            message,
        )
        assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "paths",
    [["d/" * 300_000 + "x"], [f"{n}/" + "d/" * 2000 + "x" for n in range(1000)]],
    ids=["one path", "many paths"],
)
def test_removals_with_a_million_folders_are_refused(
    server: Server, criu: Path, tmp_path: Path, paths: list[str]
) -> None:
    """If an archive lists removed files below a million folders, RestorePod fails before it makes a
    folder."""
    folder = saved(tmp_path / "saved", "one")
    # To hide these paths the server would have to make their folders.
    removed = json.dumps(paths).encode()
    members = (*IMAGES, ("deleted.files", removed), ("rootfs-diff.tar", EMPTY_TAR))
    archive(folder / f"{0:064x}.tar", *members, name="one")
    code, message = refused(server, request(server, folder, "one"))
    assert code == Code.INVALID_ARGUMENT and "deleted.files" in message, message
