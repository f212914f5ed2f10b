"""Tests the program `pyrunc` of arm64 under an emulator: it is compiled here against Debian's
Python for arm64, and starts from its snapshot."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from pyrunc.cli import entry
from tests.support import toolchain
from tests.support.debian import suite

MULTIARCH = "aarch64-linux-gnu"
INTERPRETER = f"python{sysconfig.get_python_version()}"


@pytest.fixture(scope="module")
def root() -> Path:
    """Return the root of an arm64 Debian with Python's static library; it is only unpacked."""
    release = suite()
    folder = toolchain.cache() / "debian" / f"{release}-arm64-{INTERPRETER}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unpacked = folder.with_suffix(f".{os.getpid()}")
            include = f"lib{INTERPRETER}-dev,zlib1g-dev,libexpat1-dev"
            options = [
                "--quiet",
                "--mode=root",
                "--variant=extract",
                "--arch=arm64",
                f"--include={include}",
            ]
            subprocess.run(["mmdebstrap", *options, release, unpacked], check=True)
            unpacked.rename(folder)
    return folder


@pytest.fixture(scope="module")
def program(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Compile the program and take its snapshot; return the command line that starts it."""
    folder = tmp_path_factory.mktemp("arm64")
    shutil.copytree(entry.PACKAGE, folder / "pyrunc", ignore=shutil.ignore_patterns("native"))
    (folder / "pyrunc/native").mkdir()
    paths = entry.InstallPaths(
        f"/usr/bin/{INTERPRETER}", (str(folder),), str(folder / "pyrunc/native")
    )
    built_with: dict[str, Any] = {}
    data = root / f"usr/lib/{INTERPRETER}/_sysconfigdata__{MULTIARCH}.py"
    exec(data.read_text(), built_with)
    compiler = (f"{MULTIARCH}-gcc", f"--sysroot={root}", f"-I{root}/usr/include/{MULTIARCH}")
    target = entry.BuildTarget(compiler, built_with["build_time_vars"], str(root))
    assert entry.compile_program(str(folder / "program"), paths, target)
    words = ["qemu-aarch64-static", "-L", str(root), str(folder / "program")]
    subprocess.run([*words, "--write-snapshot", paths.snapshot], check=True)
    assert Path(paths.snapshot).stat().st_size > 1 << 20
    return words


def test_the_program_starts_from_its_snapshot(program: list[str]) -> None:
    # On arm64 the linker copies variables of the C library into the program's data
    # (R_AARCH64_COPY), also one that the library has in read-only memory.
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pyrunc version ")


def test_an_error_of_the_programs_code_is_reported(program: list[str]) -> None:
    # By the compiled program: the plain script is not there.
    done = subprocess.run(
        [*program, "state", "absent"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "absent" in done.stderr and "Traceback" not in done.stderr
