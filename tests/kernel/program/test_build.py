"""Tests that the C programs of each architecture are small and static, and have no executable
data."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernel.program.harness import ROOT

SOURCES = ROOT / "pause"


def test_make_check_passes() -> None:
    if not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("no aarch64-linux-gnu-gcc")
    result = subprocess.run(
        ["make", "-s", "-C", str(SOURCES), "check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    sizes = [(name, int(size)) for name, size in re.findall(r"/(\w+): (\d+) bytes", result.stdout)]
    assert len(sizes) == 6
    assert max(size for name, size in sizes if name != "keeper") < 4096


def test_the_launcher_stays_small_enough_to_be_read() -> None:
    text = (SOURCES / "launcher.c").read_text()
    without_comments = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    assert sum(1 for line in without_comments.splitlines() if line.strip()) <= 250


@pytest.mark.parametrize("name", ["launcher.c", "pause.c", "call.h"])
def test_no_header_of_a_library_is_used(name: str) -> None:
    assert set(re.findall(r"#include (.*)", Path(SOURCES / name).read_text())) <= {'"call.h"'}
