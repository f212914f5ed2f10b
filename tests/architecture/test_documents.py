"""Checks the documents: commands, links, and the list of pages in docs/README.md."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from cri_server.cli.server.install_node import command_lines
from cri_server.config import Config
from tests.support import documents

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PROGRAMS = command_lines()


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of our programs in the `sh` blocks of a page."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        plain = re.sub(r"\s#.*", "", line)
        for part in re.split(r"&&|\|\||[;|]|\$\(|[()]|^kill .*", plain):
            words = shlex.split(part.replace("'", "").replace('"', ""))
            if words and Path(words[0]).name in PROGRAMS:
                yield [Path(words[0]).name, *words[1:]]


def unknown(words: list[str]) -> list[str]:
    """Return the words of a command that its program does not know: verbs and options."""
    command: click.Command = PROGRAMS[words[0]]
    options = _options(command)
    wrong = []
    for word in words[1:]:
        if word.startswith("-") and word != "-":
            name = word.partition("=")[0]
            wrong += [] if name in options else [word]
        elif isinstance(command, click.Group) and (
            verb := command.get_command(click.Context(command), word)
        ):
            command, options = verb, options | _options(verb)
    if isinstance(command, click.Group) and "--version" not in words and "--help" not in words:
        wrong.append(f"no verb of {words[0]}")
    return wrong


def _options(command: click.Command) -> set[str]:
    parameters = command.get_params(click.Context(command))
    return {name for p in parameters for name in (*p.opts, *p.secondary_opts)}


def broken_links(page: str) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    file = ROOT / page
    links = re.findall(r"\]\(([^)\s]+)\)", file.read_text())
    return [link for link in links if "://" not in link and not _exists(file, link)]


def _exists(file: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = file.parent / name if name else file
    if not target.exists():
        return False
    return not anchor or anchor in _anchors(target)


def _anchors(file: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub derives them."""
    headings = re.findall(r"^#+ +(.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_command_exists(page: str) -> None:
    assert [(words, wrong) for words in commands(page) if (wrong := unknown(words))] == []


def test_commands_and_mistakes_are_recognized() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 20
    assert unknown(["pyrunc-cri", "doctor", "--jsno"]) == ["--jsno"]
    assert unknown(["pyrunc-cri", "docter"]) == ["no verb of pyrunc-cri"]


def configurations(page: str) -> Iterator[dict[str, object]]:
    """Yield the `toml` blocks of a page that are parts of the server's configuration."""
    text = (ROOT / page).read_text()
    for block in re.findall(r"^ *```toml\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL):
        values = tomllib.loads(block)
        if not isinstance(values.get("server"), str):  # a hosts.toml
            yield values


@pytest.mark.parametrize("page", PAGES)
def test_every_documented_configuration_key_exists(page: str) -> None:
    for values in configurations(page):
        msgspec.convert(values, Config)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_page_and_heading(page: str) -> None:
    assert broken_links(page) == []


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


class TestBlocks:
    def test_blocks_of_a_heading_are_found(self) -> None:
        assert "kubeadm join" in documents.blocks("tasks.md", "Join a node to a cluster")[2]
        with pytest.raises(KeyError, match="no heading 'Dance'"):
            documents.blocks("tasks.md", "Dance")

    def test_all_capital_placeholders_are_filled(self) -> None:
        assert (
            documents.filled("drain NODE; PATH=$PATH:x  # ALWAYS", NODE="n1")
            == "drain n1; PATH=$PATH:x  # ALWAYS"
        )
        with pytest.raises(ValueError, match="no NODE in"):
            documents.filled("drain", NODE="n1")
        with pytest.raises(ValueError, match=r"\['TOKEN'\] of the block are not filled"):
            documents.filled("join TOKEN")
