"""Checks that every path of the project that the README, CONTRIBUTING, SECURITY and docs/ name
exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pyrunc

ROOT = Path(__file__).parents[2]
TOP = (
    "pyrunc",
    "cri_server",
    "cni_plugins",
    "pause",
    "proto",
    "tests",
    "vagrant",
    "docs",
    "debian",
)


def named_paths(text: str) -> list[str]:
    """Return the words in backquotes that begin with a folder of the project; `*` matches any
    name."""
    quoted = re.findall(r"`([^`\n]+)`", text)
    return [word for word in quoted if re.fullmatch(rf"(?:{'|'.join(TOP)})/[\w./*-]*", word)]


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
)


def named_sources(text: str) -> list[str]:
    """Return the Python and C files in backquotes, with or without a folder before the name."""
    return re.findall(r"`([\w/]+\.(?:py|c))`", text)


SOURCES = [
    f"/{path.relative_to(ROOT)}"
    for folder in TOP
    for path in ROOT.joinpath(folder).rglob("*.*")
    if path.suffix in (".py", ".c")
]


@pytest.mark.parametrize("page", PAGES)
def test_every_source_file_exists(page: str) -> None:
    names = named_sources((ROOT / page).read_text())
    assert [n for n in names if not any(path.endswith(f"/{n}") for path in SOURCES)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_named_path_exists(page: str) -> None:
    named = named_paths((ROOT / page).read_text())
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []


def test_the_readme_names_the_code() -> None:
    assert len(named_paths((ROOT / "README.md").read_text())) > 15


def test_the_changelog_begins_with_the_codes_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == pyrunc.__version__


CALLS = ("RunPodSandbox", "CreateContainer", "StartContainer", "ExecSync")
MOST_FILES = 20


def traced_section() -> str:
    text = (ROOT / "README.md").read_text()
    return text.split("## One RunPodSandbox, traced\n")[1].split("\n## ")[0]


def files_of(call: str) -> tuple[list[str], int]:
    """Return the files that the README's row for `call` lists, relative to the project's root, and
    the number in its last cell."""
    row = next(line for line in traced_section().splitlines() if line.startswith(f"| {call} |"))
    _, _, server, shim, then, count, _ = row.split("|")
    cells = (("cri_server", server), ("pyrunc", shim), ("cri_server", then))
    files = [f"{top}/{name}" for top, cell in cells for name in named_sources(cell)]
    return files, int(count)


@pytest.mark.parametrize("call", CALLS)
def test_each_call_can_be_followed_through_a_few_files(call: str) -> None:
    files, count = files_of(call)
    assert count == len(files) == len(set(files)) <= MOST_FILES
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_walk_through_run_pod_sandbox_names_the_files_of_the_list() -> None:
    walk = traced_section().strip().split("\n\n")[0]
    named = {Path(name).name for name in named_sources(walk)}
    files, _ = files_of("RunPodSandbox")
    assert [name for name in files if Path(name).name not in named] == []
