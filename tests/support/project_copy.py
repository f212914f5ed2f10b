"""Copies the project's code and tests, changes or removes a part, and runs the copy's tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "*.egg-info", "build", "kube", "vm", "bench"
)
_PROGRAM = """\
#!{python} -IS
import os, sys
sys.path += {searched!r}
from pyrunc.cli.main import main
sys.exit(main())
"""


class ProjectCopy:
    """A copy of the project in `folder`; `program` is the copy's `pyrunc`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, folder / "bin/pyrunc"
        for part in ("pyrunc", "cri_server", "cni_plugins", "tests"):
            shutil.copytree(REPOSITORY / part, folder / part, ignore=_IGNORED)
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        searched = [
            str(folder),
            *dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))),
        ]
        self.program.parent.mkdir()
        self.program.write_text(
            _PROGRAM.format(python=os.path.realpath(sys.executable), searched=searched)
        )
        self.program.chmod(0o755)

    def run_tests(self, *tests: str, temporary: Path) -> subprocess.CompletedProcess[str]:
        """Run these tests in the copy up to the first failure; return pytest's result."""
        command: Sequence[str] = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "not slow",
            *tests,
            "--basetemp",
            str(temporary),
        ]
        environment = {**os.environ, "PYRUNC_RUNTIME": str(self.program)}
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
