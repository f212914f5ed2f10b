"""A runtime per test; at its end every container is deleted, the state folder is empty, and nobody's child is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.kernel.reaper import set_child_subreaper
from tests.support import bundle
from tests.system.harness import Runtime


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle.make_root(tmp_path_factory.mktemp("rootfs") / "root")


@pytest.fixture(scope="package", autouse=True)
def parent_of_containers() -> Iterator[None]:
    """Containers come to us when their runtime has ended, as they come to a shim; not so in other folders' tests."""
    set_child_subreaper(True)
    yield
    set_child_subreaper(False)


@pytest.fixture
def runtime(tmp_path: Path, rootfs: Path) -> Iterator[Runtime]:
    made = Runtime(tmp_path, rootfs)
    yield made
    for name in made.ids:
        made("kill", "--all", name, "KILL")
        reap()  # a pid namespace ends when everybody in it was reaped, an exec by us
        made("delete", "--force", name)
    reap()
    left = sorted(p.name for p in made.root.iterdir()) if made.root.exists() else []
    assert not left, f"state left behind: {left}"


def reap(wait_s: float = 0.0) -> None:
    """Take the exit status of every dead child, and wait a moment for those that are about to die."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid and time.monotonic() > deadline:
            return
        if not pid:
            time.sleep(0.02)
