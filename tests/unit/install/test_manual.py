"""Tests that manual pages and completions describe the command lines."""

from __future__ import annotations

import re
import subprocess

import click
import pytest

from cri_server.cli.main import program
from cri_server.install import config_file, manual
from cri_server.install.files import files, packaged
from pyrunc.cli import click_front
from pyrunc.cli.table import VERBS

assert isinstance(program, click.Group)
PROGRAMS = {"pyrunc-cri": program, "pyrunc": click_front.program()}
TEXTS = {file.path: file.text for file in files(packaged("/usr/bin/pyrunc-cri"), PROGRAMS)}
PAGES = {path: text for path, text in TEXTS.items() if "/man/" in path}


def rendered(page: str) -> str:
    """Return the page as a terminal of 160 columns shows it, with single spaces."""
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-rLL=160n", "-P-cbou"],
        input=page, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return " ".join(done.stdout.replace("\u2010", "-").split())


def test_each_program_and_the_configuration_have_a_page() -> None:
    assert sorted(path.rpartition("/")[2] for path in PAGES) == [
        "pyrunc-config.5",
        "pyrunc-cri.8",
        "pyrunc.8",
    ]


def test_every_verb_and_option_of_pyrunc_is_on_its_page() -> None:
    text = rendered(manual.command_page("pyrunc", PROGRAMS["pyrunc"]))
    for verb in VERBS.values():
        assert verb.help in text
        for option in verb.options:
            assert f"--{option.names[0]}" in text and option.help in text


def test_every_command_of_the_server_is_on_its_page() -> None:
    text = rendered(manual.command_page("pyrunc-cri", program))
    context = click.Context(program)
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None
        assert (f" {name} [OPTIONS]" in text) is not command.hidden


def test_every_key_is_on_the_configurations_page() -> None:
    text = rendered(manual.config_page())
    for section in config_file.sections():
        for key in section.keys:
            assert f"{key.name} = {key.default}" in text


@pytest.mark.parametrize("words", [r"\fBx", ".so /etc/shadow", "'br", "a\\", 'say "x"'])
def test_text_is_escaped_for_roff(words: str) -> None:
    group = click.Group("x", help="X.", commands={"y": click.Command("y", help=words)})
    assert words.replace("'", "’").strip("’") in rendered(manual.command_page("x", group)).replace(
        "'", "’"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_shell_gets_a_script_that_asks_the_program(name: str) -> None:
    scripts = [
        text
        for path, text in TEXTS.items()
        if re.search(rf"/_?{name}(\.fish)?$", path) and "/man/" not in path
    ]
    assert len(scripts) == 3
    for script, shell in zip(scripts, ("bash", "zsh", "fish"), strict=True):
        assert f"{shell}_complete" in script
    assert scripts[1].startswith(f"#compdef {name}\n")
