"""The README is the map: every path that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("pyrunc", "cri_server", "cni_plugins", "pause", "proto", "tests", "vagrant")


def named_paths(text: str) -> list[str]:
    """Words in backquotes that begin with one of our folders; `*` stands for any part of a name."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return [word for word in quoted if re.fullmatch(rf"(?:{'|'.join(TOP)})/[\w./*-]*", word)]


def test_every_path_is_there() -> None:
    named = named_paths((ROOT / "README.md").read_text())
    assert len(named) > 15
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []
