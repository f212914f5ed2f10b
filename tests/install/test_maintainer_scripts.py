"""Debian's maintainer scripts, run on their own with programs of the test's in place of the package's."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parents[2] / "debian"
WRITES_SNAPSHOT = '[ "$1" != --write-snapshot ] || { echo taken >"$2"; exit 0; }\n'


@dataclass
class Installed:
    """The package's files below a folder, which the scripts take for the root directory."""

    root: Path

    @property
    def program(self) -> Path:
        return self.root / "usr/bin/pyrunc"

    @property
    def native(self) -> Path:
        return self.root / "usr/lib/pyrunc/pyrunc/native"

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a maintainer script with all paths below the folder."""
        text = (DEBIAN / script).read_text()
        for top in ("usr", "run", "etc", "var"):
            text = text.replace(f" /{top}/", f" {self.root}/{top}/").replace(
                f"=/{top}/", f"={self.root}/{top}/"
            )
        return subprocess.run(
            ["sh", "-c", text, script, *arguments], capture_output=True, text=True, check=False
        )


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    found = Installed(tmp_path)
    found.native.mkdir(parents=True)
    found.program.parent.mkdir(parents=True)
    write_program(found.native / "pyrunc-script", "echo the script\n")
    return found


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def starts(installed: Installed) -> bool:
    return subprocess.run([installed.program, "--version"], check=False).returncode == 0


def test_a_program_that_starts_keeps_its_snapshot(installed: Installed) -> None:
    write_program(installed.program, WRITES_SNAPSHOT)
    done = installed.run("postinst", "triggered")
    assert (done.returncode, done.stderr) == (0, "")
    assert (installed.native / "pyrunc-snapshot").read_text() == "taken\n"
    assert installed.program.read_text().endswith(WRITES_SNAPSHOT)


# What the program does wrong, and what the script says of it.
FAILURES = {
    "a snapshot that kills it": (
        WRITES_SNAPSHOT + "[ ! -e {snapshot} ] || kill -SEGV $$\n",
        "does not start from its snapshot",
    ),
    "no snapshot": ('[ "$1" != --write-snapshot ] || { echo half >"$2"; exit 1; }\n', "no snapshot"),
    "a signal at each start": ("kill -SEGV $$\n", "the plain script is in its place"),
    "a signal once it has its snapshot": (WRITES_SNAPSHOT + "kill -SEGV $$\n", "the plain script is in its place"),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_a_package_leaves_a_program_that_starts(installed: Installed, failure: str) -> None:
    program, message = FAILURES[failure]
    snapshot = installed.native / "pyrunc-snapshot"
    write_program(installed.program, program.replace("{snapshot}", str(snapshot)))
    done = installed.run("postinst", "triggered")
    assert done.returncode == 0
    assert message in done.stderr
    assert starts(installed)
    assert sorted(path.name for path in installed.native.iterdir()) == ["pyrunc-script"]
    assert [path.name for path in installed.program.parent.iterdir()] == ["pyrunc"]


def test_a_program_that_the_kernel_cannot_run_gives_way_to_the_script(installed: Installed) -> None:
    installed.program.write_bytes(b"\x7fELF and nothing else")
    installed.program.chmod(0o755)
    assert installed.run("postinst", "triggered").returncode == 0
    assert starts(installed)
