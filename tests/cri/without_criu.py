"""Provides a server whose PATH has no CRIU, or a program of that name that only fails; and archives
of checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cri.server_harness import IMAGE, Server
from tests.support.processes import wait_until

Code = grpc.StatusCode


COUNT = "i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.02; done"


SLOW = "#!/bin/sh\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"


SEPARATE = {"namespaces": [{"type": kind} for kind in ("network", "pid", "ipc")]}
"""As a container of an ordinary pod has them."""

IMAGES = (
    ("checkpoint", None),
    ("checkpoint/inventory.img", b"x"),
    ("checkpoint/descriptors.json", b"[]"),
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the server's PATH: a folder without a criu, which the fixture `criu` adds."""
    folder = tmp_path_factory.mktemp("bin")
    # nsenter starts the server.
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
    """Add a program `criu`, which fails at once, to the server's PATH; return its path."""
    path = programs / "criu"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    yield path
    path.unlink()


def count(server: Server, container: str) -> int:
    return int(server.output(container, "cat", "/count") or 0)


def goes_on(server: Server, container: str) -> None:
    """Assert that the container runs and that its checkpoint has left nothing."""
    before = count(server, container)
    assert wait_until(lambda: count(server, container) > before, 30)
    assert sorted(p.name for p in (server.root / "containers" / container).iterdir()) == [
        "upper",
        "work",
    ]


def launch_counting(server: Server) -> str:
    container = server.launch(server.run_pod(), server.container_config(["sh", "-c", COUNT]))
    assert wait_until(lambda: server.output(container, "ls", "/").find("count") >= 0, 30)
    return container


def archive(path: Path, *members: tuple[str, bytes | str | None], **config: Any) -> str:
    """Write a tar of `members`: files, folders (None) and symbolic links (text). A checkpoint's
    metadata files are added, unless `members` names them."""
    named = {name for name, _ in members}
    documents = {
        "config.dump": {"name": "c", "rootfsImageName": IMAGE, **config},
        "spec.dump": {"process": {"terminal": False}, "mounts": [], "linux": SEPARATE},
    }
    files: list[tuple[str, bytes | str | None]] = [
        (name, json.dumps(content).encode())
        for name, content in documents.items()
        if name not in named
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
