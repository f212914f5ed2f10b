"""Tests that the output of `pyrunc-cri --help` fits into 80 columns."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from cri_server.cli.main import COMMANDS, SUMMARY_CHARACTERS, program, summary


def test_no_line_of_help_is_cut_in_80_columns() -> None:
    text = CliRunner().invoke(program, ["--help"], terminal_width=80).output
    assert not [
        line for line in text.splitlines() if line.endswith("...") and line.startswith("  ")
    ]
    assert max(map(len, text.splitlines())) <= 80
    summaries = {
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "
    }
    assert {name for name in COMMANDS if name != "demo-server"} <= summaries


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("List pods.", "List pods"),
        ("Look for what is wrong. And more.\n\nParagraph.", "Look for what is wrong"),
        (f"Do this; {'and that ' * 9}", "Do this"),
        (f"Do this: a, b, {'c ' * 40}", "Do this"),
        (f"Do this (or {'that ' * 20})", "Do this"),
        (f"Do this, {'then that ' * 9}", "Do this"),
    ],
)
def test_a_long_summary_is_cut_at_a_punctuation_mark(text: str, short: str) -> None:
    assert summary(text) == short and len(short) <= SUMMARY_CHARACTERS
