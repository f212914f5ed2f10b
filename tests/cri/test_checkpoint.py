"""CheckpointContainer and CreateContainer from an archive, as far as they go without CRIU: what is refused, and that nothing is left.

Where CRIU is needed a program of that name is at hand which only fails, or never ends. With the real one: tests/vm/inside.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.spec import groups
from tests.cri.server_harness import IMAGE, Server, code_of, message_of
from tests.support.processes import wait_until

Code = grpc.StatusCode
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.02; done"
SLOW = "#!/bin/sh\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server's PATH is: nsenter, with which it is started, and maybe a criu."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("nsenter", "sh", "sleep"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@contextlib.contextmanager
def started(programs: Path) -> Iterator[Server]:
    with Server() as server:
        server.stop()
        server.start(PATH=str(programs))
        server.load_image()
        yield server


@pytest.fixture(scope="module")
def module_server(programs: Path) -> Iterator[Server]:
    with started(programs) as server:
        yield server


@pytest.fixture
def criu(programs: Path) -> Iterator[Path]:
    """A criu that ends at once."""
    path = programs / "criu"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    yield path
    path.unlink()


def checkpoint(server: Server, container: str, location: Path | str, timeout: int = 0) -> None:
    request = api.CheckpointContainerRequest(container_id=container, location=str(location), timeout=timeout)
    server.runtime.CheckpointContainer(request, timeout=60)


def count(server: Server, container: str) -> int:
    return int(server.output(container, "cat", "/count") or 0)


def goes_on(server: Server, container: str) -> None:
    """It runs, and nothing of a checkpoint is left of it."""
    before = count(server, container)
    assert wait_until(lambda: count(server, container) > before, 30)
    assert sorted(p.name for p in (server.root / "containers" / container).iterdir()) == ["upper", "work"]


def launch_counting(server: Server) -> str:
    container = server.launch(server.run_pod(), server.container_config(["sh", "-c", COUNT]))
    assert wait_until(lambda: server.output(container, "ls", "/").find("count") >= 0, 30)
    return container


@pytest.fixture
def counting(server: Server) -> str:
    return launch_counting(server)


def test_without_criu(server: Server, counting: str, tmp_path: Path) -> None:
    assert code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar")) == Code.FAILED_PRECONDITION
    assert "criu is not in $PATH" in message_of(lambda: checkpoint(server, counting, tmp_path / "a.tar"))
    goes_on(server, counting)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_right(server: Server, counting: str, criu: Path, tmp_path: Path) -> None:
    for location in ("", "relative.tar", tmp_path, f"{tmp_path}/x/", "/no/such/folder/x.tar", "/x\0"):
        assert (
            code_of(lambda location=location: checkpoint(server, counting, location)) == Code.INVALID_ARGUMENT
        )  # type: ignore[misc]
    good = tmp_path / "a.tar"
    assert code_of(lambda: checkpoint(server, counting, good, -1)) == Code.INVALID_ARGUMENT
    assert code_of(lambda: checkpoint(server, "0" * 64, good)) == Code.NOT_FOUND
    created = server.create(server.run_pod())
    assert code_of(lambda: checkpoint(server, created, good)) == Code.FAILED_PRECONDITION
    server.stop_container(counting)
    assert code_of(lambda: checkpoint(server, counting, good)) == Code.FAILED_PRECONDITION


def test_a_failure_leaves_all_as_it_was(server: Server, counting: str, criu: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"of before")
    assert "criu" in message_of(lambda: checkpoint(server, counting, tmp_path / "a.tar"))
    goes_on(server, counting)
    assert [p.name for p in tmp_path.iterdir()] == ["a.tar"] and (
        tmp_path / "a.tar"
    ).read_bytes() == b"of before"


def test_the_time_is_up(server: Server, counting: str, criu: Path, tmp_path: Path) -> None:
    """The caller hears it at once. CRIU is left to end by itself; then the container goes on, and nothing is left."""
    criu.write_text(SLOW.format(folder=tmp_path))
    assert code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar", 1)) == Code.DEADLINE_EXCEEDED
    assert (
        "a checkpoint of container" in message_of(lambda: checkpoint(server, counting, tmp_path / "b.tar"))
        or "is paused" in message_of(lambda: checkpoint(server, counting, tmp_path / "b.tar"))
    )  # fmt: skip
    (tmp_path / "go").touch()
    work = server.root / "containers" / counting / "checkpoint"
    assert wait_until(lambda: not work.exists(), 60)
    goes_on(server, counting)
    assert [p.name for p in tmp_path.iterdir()] == ["go"]


def test_a_server_that_is_killed_meanwhile(criu: Path, programs: Path, tmp_path: Path) -> None:
    """The one that is started again lets the container go on, and removes what was begun."""
    criu.write_text(SLOW.format(folder=tmp_path))
    with started(programs) as server:
        counting = launch_counting(server)
        assert code_of(lambda: checkpoint(server, counting, tmp_path / "a.tar", 1)) == Code.DEADLINE_EXCEEDED
        group = Path(groups.place(_cgroup(server, counting), counting).directory)
        assert "frozen 1" in (group / "cgroup.events").read_text()
        server.kill()
        server.start(PATH=str(programs))
        goes_on(server, counting)
        assert not list(tmp_path.iterdir())


def _cgroup(server: Server, container: str) -> str:
    request = api.ContainerStatusRequest(container_id=container, verbose=True)
    return str(json.loads(server.runtime.ContainerStatus(request).info["info"])["cgroupsPath"])


# -- archives


def archive(path: Path, *members: tuple[str, bytes | str | None], **config: Any) -> str:
    """A tar of files, folders (None) and links (text); with the documents that a checkpoint has, unless they are named."""
    named = {name for name, _ in members}
    documents = {
        "config.dump": {"name": "c", "rootfsImageName": IMAGE, **config},
        "spec.dump": {"process": {"terminal": False}, "mounts": []},
    }
    files: list[tuple[str, bytes | str | None]] = [
        (name, json.dumps(content).encode()) for name, content in documents.items() if name not in named
    ]
    with tarfile.open(path, "w") as tar:
        for name, content in [*files, *members]:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return str(path)


def refused(server: Server, reference: str) -> tuple[Code, str]:
    """What CreateContainer says; nothing of the container is left."""
    pod = server.run_pod()
    before = sorted(p.name for p in (server.root / "containers").iterdir())
    config = server.container_config(image=api.ImageSpec(image=reference))
    found = code_of(lambda: server.create(pod, config)), message_of(lambda: server.create(pod, config))
    assert sorted(p.name for p in (server.root / "containers").iterdir()) == before
    assert not list((server.state / "containers").iterdir())
    return found


IMAGES = ("checkpoint", None), ("checkpoint/inventory.img", b"x"), ("checkpoint/descriptors.json", b"[]")


def test_an_archive_is_restored_by_criu_only(server: Server, criu: Path, tmp_path: Path) -> None:
    """All is well until CRIU is asked: then the container has ended before it began, like any that cannot be started."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        member = tarfile.TarInfo("written")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    content = ("rootfs-diff.tar", layer.getvalue()), ("deleted.files", b'["/etc/group"]')
    path = archive(tmp_path / "a.tar", *IMAGES, *content)
    made = server.create(server.run_pod(), server.container_config(image=api.ImageSpec(image=path)))
    upper = server.root / "containers" / made / "upper"
    assert (upper / "written").read_bytes() == b"data" and (upper / "etc/group").is_char_device()
    assert server.status(made).image.image == IMAGE
    assert "criu" in message_of(lambda: server.start_container(made))
    status = server.status(made)
    assert (status.state, status.exit_code, status.reason) == (api.CONTAINER_EXITED, 128, "StartError")


def test_what_is_no_archive(server: Server, criu: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar")
    for reference, code, why in (
        (str(tmp_path / "missing"), Code.NOT_FOUND, "there is no archive"),
        (str(tmp_path), Code.INVALID_ARGUMENT, "is no regular file"),
        ("/dev/null", Code.INVALID_ARGUMENT, "is no regular file"),
        (str(tmp_path / "text"), Code.INVALID_ARGUMENT, "the checkpoint's archive"),
        (archive(tmp_path / "empty.tar"), Code.INVALID_ARGUMENT, "has no folder checkpoint"),
        (archive(tmp_path / "image.tar", *IMAGES, rootfsImageName="registry.test/none:1"), None, ""),
    ):
        found, said = refused(server, reference)
        assert (code is None or found == code) and why in said, (reference, found, said)


@pytest.mark.parametrize(
    "members",
    [
        [("checkpoint", "/etc")],
        [("checkpoint", None), ("checkpoint/pages-1.img", "/etc/shadow")],
        [*IMAGES, ("config.dump", "/etc/passwd")],
        [*IMAGES, ("rootfs-diff.tar", "/etc/passwd")],
        [*IMAGES, ("../escaped", b"x")],
        [*IMAGES, ("deleted.files", b'["../../escaped"]')],
        [*IMAGES, ("rootfs-diff.tar", b"no tar at all" * 100)],
        [*IMAGES, ("checkpoint/below", None)],
    ],
    ids=["folder", "image", "config", "layer", "escape", "removal", "no-tar", "folders"],
)
def test_a_hostile_archive(
    server: Server, criu: Path, tmp_path: Path, members: list[tuple[str, bytes | str | None]]
) -> None:
    code, said = refused(server, archive(tmp_path / "a.tar", *members))
    assert code == Code.INVALID_ARGUMENT and "checkpoint" in said, said
    # os.walk passes over what the emptying of the trash takes away meanwhile.
    assert not [path for path, _, names in os.walk(server.root) if "escaped" in names]
    assert not (tmp_path.parent / "escaped").exists()


def test_the_request_must_fit(server: Server, criu: Path, tmp_path: Path) -> None:
    spec = {"mounts": [{"destination": "/data", "type": "bind", "source": "/etc"}]}
    code, said = refused(
        server, archive(tmp_path / "a.tar", *IMAGES, ("spec.dump", json.dumps(spec).encode()))
    )
    assert code == Code.INVALID_ARGUMENT and "had mounts of the host at /data" in said


def test_without_criu_nothing_is_created(server: Server, tmp_path: Path) -> None:
    code, said = refused(server, archive(tmp_path / "a.tar", *IMAGES))
    assert code == Code.FAILED_PRECONDITION and "criu is not in $PATH" in said
