"""What the pages tell people to type: our programs have every verb and every option of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cri_server.cli.server.install_node import command_lines
from tests.support import documents

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PROGRAMS = command_lines()


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command of ours in the `sh` blocks of a page."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL
    )
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        plain = re.sub(r"\s#.*", "", line)
        for part in re.split(r"&&|\|\||[;|]|\$\(|[()]|^kill .*", plain):
            words = shlex.split(part.replace("'", "").replace('"', ""))
            if words and Path(words[0]).name in PROGRAMS:
                yield [Path(words[0]).name, *words[1:]]


def unknown(words: list[str]) -> list[str]:
    """The words that the program does not know: its verb, or an option."""
    command: click.Command = PROGRAMS[words[0]]
    options = _options(command)
    wrong = []
    for word in words[1:]:
        if word.startswith("-") and word != "-":
            name = word.partition("=")[0]
            wrong += [] if name in options else [word]
        elif isinstance(command, click.Group) and (
            found := command.get_command(click.Context(command), word)
        ):
            command, options = found, options | _options(found)
    if isinstance(command, click.Group) and "--version" not in words and "--help" not in words:
        wrong.append(f"no verb of {words[0]}")
    return wrong


def _options(command: click.Command) -> set[str]:
    parameters = command.get_params(click.Context(command))
    return {name for p in parameters for name in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one(page: str) -> None:
    assert [(words, wrong) for words in commands(page) if (wrong := unknown(words))] == []


def test_pages_are_read() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 20
    assert unknown(["pyrunc-cri", "doctor", "--jsno"]) == ["--jsno"]
    assert unknown(["pyrunc-cri", "docter"]) == ["no verb of pyrunc-cri"]


class TestBlocks:
    def test_of_a_heading(self) -> None:
        assert "kubeadm join" in documents.blocks("tasks.md", "Join a node to a cluster")[2]
        with pytest.raises(KeyError, match="no heading 'Dance'"):
            documents.blocks("tasks.md", "Dance")

    def test_capital_words_are_filled_all_of_them(self) -> None:
        assert (
            documents.filled("drain NODE; PATH=$PATH:x  # ALWAYS", NODE="n1")
            == "drain n1; PATH=$PATH:x  # ALWAYS"
        )
        with pytest.raises(ValueError, match="no NODE in"):
            documents.filled("drain", NODE="n1")
        with pytest.raises(ValueError, match=r"\['TOKEN'\] of the block are not filled"):
            documents.filled("join TOKEN")
