"""Tests the words that the programs give to the shells' completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def completions(program: Path, words: str) -> list[str]:
    name = program.name.upper().replace("-", "_")
    environment = {
        f"_{name}_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr and done.returncode == 0, done
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pyrunc pa", ["pause"]),
        ("pyrunc create --console", ["--console-socket"]),
        ("pyrunc zz", []),
    ],
)
def test_the_runtime_completes_verbs_and_options(words: str, expected: list[str]) -> None:
    assert completions(BIN / "pyrunc", words) == expected


def test_a_verb_is_carried_out_despite_completion_variables() -> None:
    environment = {
        "_PYRUNC_COMPLETE": "bash_complete",
        "COMP_WORDS": "pyrunc pa",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [BIN / "pyrunc", "--version"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("pyrunc version")


def test_the_server_completes_verbs_and_options() -> None:
    assert completions(BIN / "pyrunc-cri", "pyrunc-cri install-node --uni") == ["--uninstall"]
