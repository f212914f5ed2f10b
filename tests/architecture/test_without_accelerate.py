"""Checks that pyrunc/accelerate changes nothing but speed: tests of exec and of the shim pass
without this folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.project_copy import ProjectCopy
from tests.system.harness import reap

TESTS = (
    "tests/system/test_exec.py",
    "tests/cri/rpc/test_exec.py",
    "tests/kernel/shim/test_containers.py",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tests", TESTS)
def test_the_tests_pass_without_the_folder_accelerate(tests: str, tmp_path: Path) -> None:
    copy = ProjectCopy(tmp_path / "copy")
    shutil.rmtree(copy.folder / "pyrunc/accelerate")
    # A short path, because the name of a socket below it has at most 107 bytes (unix(7)).
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        result = copy.run_tests(tests, temporary=Path(temporary) / "t")
        reap(5.0)  # orphans of the copy's tests
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-3000:]
