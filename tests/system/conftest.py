"""Provides a runtime per test; at its end every container is deleted, the state folder is empty,
and no child is left."""

from __future__ import annotations

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
    """Make this process a subreaper for the tests of this folder: as with a shim, containers become
    its children when their runtime has ended."""
    set_child_subreaper(True)
    yield
    set_child_subreaper(False)


@pytest.fixture
def runtime(tmp_path: Path, rootfs: Path) -> Iterator[Runtime]:
    runtime_under_test = Runtime(tmp_path, rootfs)
    yield runtime_under_test
    runtime_under_test.clean_up()
