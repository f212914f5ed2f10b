"""What attacks need: a runtime with a root filesystem that may be spoilt, the hostile program, and
a canary on the host.

The ledger of tests/conftest.py knows other folders only, so this one asks it itself: an attack must
not even leave litter.
"""

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
    before = ledger.take()
    yield
    left = ledger.settle(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left))


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hostile program, static."""
    made = tmp_path_factory.mktemp("probe") / "probe"
    subprocess.run(["gcc", "-O1", "-static", "-Wall", "-o", made, HERE / "probe.c"], check=True)
    return made


@pytest.fixture(scope="package", autouse=True)
def parent_of_containers() -> Iterator[None]:
    set_child_subreaper(True)
    yield
    set_child_subreaper(False)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Path:
    made = bundle.make_root(tmp_path_factory.mktemp("template") / "root")
    (made / "bin/probe").hardlink_to(probe)
    return made


@pytest.fixture
def rootfs(tmp_path: Path, template: Path) -> Path:
    """A root filesystem of this test's own, with the hostile program in /bin; programs are links to
    common files."""
    made = tmp_path / "image"
    shutil.copytree(template, made, symlinks=True, copy_function=os.link)
    for name in ("passwd", "group"):
        content = (made / "etc" / name).read_text()
        (made / "etc" / name).unlink()
        (made / "etc" / name).write_text(content)
    return made


@pytest.fixture
def runtime(tmp_path: Path, rootfs: Path) -> Iterator[Runtime]:
    made = Runtime(tmp_path, rootfs)
    yield made
    made.clean_up()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """A folder of the host that no attack may touch, and that is watched."""
    made = Canary(tmp_path / "canary")
    yield made
    made.is_untouched()
    made.close()


@pytest.fixture(autouse=True)
def outside_is_as_before() -> Iterator[None]:
    """Settings, mounts and device files of the host are as they were, whatever the test did."""
    before = Outside()
    yield
    assert Outside() == before


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A CRI server on folders that somebody made before it, for all to write to, under umask 0."""
    set_child_subreaper(False)
    made = Server(network=False)
    for folder in (made.root, made.state):
        folder.mkdir()
        folder.chmod(0o777)
    before = os.umask(0)
    try:
        made.__enter__()
    finally:
        os.umask(before)
    with contextlib.ExitStack() as stack:
        stack.push(made)
        made.load_image()
        yield made
    set_child_subreaper(True)


@pytest.fixture(scope="module")
def host_pod(server: Server) -> str:
    """A pod on the host's network."""
    return server.run_pod(server.pod_config("victim"), host_network=True)
