"""Fixtures of attacks: a runtime with a root filesystem that tests may damage, the hostile program,
and a canary on the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.kernel.reaper import set_child_subreaper
from tests.cri.server_harness import Server
from tests.security.attack import Canary, Outside
from tests.support import bundle, ledger
from tests.system.harness import Runtime

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def nothing_left_by_attacks() -> Iterator[None]:
    # The ledger fixture of tests/conftest.py covers other folders only.
    with ledger.nothing_left("the test"):
        yield


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the hostile program, compiled statically from probe.c."""
    program = tmp_path_factory.mktemp("probe") / "probe"
    subprocess.run(["gcc", "-O1", "-static", "-Wall", "-o", program, HERE / "probe.c"], check=True)
    return program


@pytest.fixture(scope="package", autouse=True)
def parent_of_containers() -> Iterator[None]:
    set_child_subreaper(True)
    yield
    set_child_subreaper(False)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Path:
    root = bundle.make_root(tmp_path_factory.mktemp("template") / "root")
    (root / "bin/probe").hardlink_to(probe)
    return root


@pytest.fixture
def rootfs(tmp_path: Path, template: Path) -> Path:
    """Make a root filesystem for this test, with the hostile program in /bin."""
    image = tmp_path / "image"
    # All files but passwd and group are hard links to those of `template`.
    shutil.copytree(template, image, symlinks=True, copy_function=os.link)
    for name in ("passwd", "group"):
        content = (image / "etc" / name).read_text()
        (image / "etc" / name).unlink()
        (image / "etc" / name).write_text(content)
    return image


@pytest.fixture
def runtime(tmp_path: Path, rootfs: Path) -> Iterator[Runtime]:
    runtime = Runtime(tmp_path, rootfs)
    yield runtime
    runtime.clean_up()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """Provide a folder of the host that no attack may touch, watched by inotify."""
    canary = Canary(tmp_path / "canary")
    yield canary
    canary.is_untouched()
    canary.close()


@pytest.fixture(autouse=True)
def outside_is_as_before() -> Iterator[None]:
    """Check that sysctls and /dev/null of the host are unchanged after the test."""
    before = Outside()
    yield
    assert Outside() == before


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Provide a CRI server that was started under umask 0 with existing folders of mode 0777."""
    set_child_subreaper(False)
    server = Server(network=False)
    for folder in (server.root, server.state):
        folder.mkdir()
        folder.chmod(0o777)
    before = os.umask(0)
    try:
        server.__enter__()
    finally:
        os.umask(before)
    with contextlib.ExitStack() as stack:
        stack.push(server)
        server.load_image()
        yield server
    set_child_subreaper(True)


@pytest.fixture(scope="module")
def host_pod(server: Server) -> str:
    """Return the id of a pod with host networking."""
    return server.run_pod(server.pod_config("victim"), host_network=True)
