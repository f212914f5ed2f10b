"""Tests that `pyrunc` parses command lines as Go programs do: spellings, values and error texts."""

from __future__ import annotations

import click
import pytest

from pyrunc.cli import click_front
from pyrunc.cli.parse import Misuse, parse
from pyrunc.cli.table import FLAG, GLOBAL, LIST, NUMBER, TRISTATE, VERBS


@pytest.mark.parametrize(
    "words",
    [
        ["create", "--bundle", "/b", "x"],
        ["create", "-bundle", "/b", "x"],
        ["create", "--bundle=/b", "x"],
        ["create", "-b", "/b", "x"],
        ["create", "-b=/b", "x"],
        ["create", "x", "--bundle", "/b"],
    ],
)
def test_all_spellings_of_an_option_are_accepted(words: list[str]) -> None:
    call = parse(words)
    assert (call.options["bundle"], call.arguments) == ("/b", ["x"])


def test_a_command_line_of_containerd_is_parsed() -> None:
    call = parse(
        [
            "--root",
            "/r",
            "--log",
            "/b/log.json",
            "--log-format",
            "json",
            "--systemd-cgroup",
            "create",
            "--bundle",
            "/b",
            "--pid-file",
            "/b/init.pid",
            "--console-socket",
            "/s",
            "-no-subreaper",
            "x1",
        ]
    )
    assert (
        call.globals["root"] == "/r"
        and call.globals["log_format"] == "json"
        and call.globals["systemd_cgroup"]
    )
    assert (
        call.options["pid_file"] == "/b/init.pid"
        and call.options["no_subreaper"]
        and call.arguments == ["x1"]
    )


def test_options_end_at_the_first_argument_of_exec() -> None:
    call = parse(["exec", "-t", "box", "ls", "-l", "--help"])
    assert call.options["tty"] and call.arguments == ["box", "ls", "-l", "--help"] and not call.help


def test_two_dashes_end_the_options() -> None:
    assert parse(["start", "--", "-odd"]).arguments == ["-odd"]


def test_the_word_after_an_option_is_its_value_also_with_a_dash() -> None:
    assert parse(["update", "--memory", "-1", "box"]).options["memory"] == "-1"
    assert parse(["update", "--resources", "-", "box"]).options["resources"] == "-"


@pytest.mark.parametrize(
    ("word", "value"),
    [("--force", True), ("--force=true", True), ("-f=false", False), ("-f=0", False)],
)
def test_flags_may_carry_a_value(word: str, value: bool) -> None:
    assert parse(["delete", word, "x"]).options["force"] is value


def test_repeated_options_add_up_and_commas_are_part_of_a_value() -> None:
    assert parse(["exec", "-e", "A=1,2", "--env", "B=", "x", "c"]).options["env"] == ("A=1,2", "B=")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create", "--bundle"], "flag needs an argument: -bundle"),
        (["create", "--bund", "/b", "x"], "flag provided but not defined: -bund"),
        (["start"], '"start" requires exactly 1 argument(s)'),
        (["start", "a", "b"], '"start" requires exactly 1 argument(s)'),
        (["kill"], '"kill" requires a minimum of 1 argument(s)'),
        (["kill", "a", "b", "c"], '"kill" requires a maximum of 2 argument(s)'),
        (["exec"], '"exec" requires a minimum of 1 argument(s)'),
        (
            ["create", "--preserve-fds", "x", "y"],
            "invalid value 'x' for flag -preserve-fds: not a number",
        ),
        (["delete", "--force=maybe", "x"], "invalid boolean value 'maybe' for -force"),
        (["fly"], "unknown command 'fly'"),
        (["--root"], "flag needs an argument: -root"),
    ],
)
def test_misuse_is_reported_with_gos_texts(words: list[str], message: str) -> None:
    with pytest.raises(Misuse) as caught:
        parse(words)
    assert caught.value.message == message


def test_help_wins_over_missing_arguments() -> None:
    assert parse(["start", "--help"]).help
    assert parse(["-h"]).help


def test_click_has_the_same_verbs_and_options() -> None:
    program = click_front.program()
    assert set(program.commands) == set(VERBS)
    for name, verb in VERBS.items():
        command = program.commands[name]
        click_options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        assert set(click_options) == {option.key for option in verb.options}
        for option in verb.options:
            click_option = click_options[option.key]
            assert {word.lstrip("-") for word in click_option.opts} == set(option.names)
            assert click_option.is_flag == (option.kind in (FLAG, TRISTATE))
            assert click_option.multiple == (option.kind == LIST)
            assert isinstance(click_option.type, click.types.IntParamType) == (
                option.kind == NUMBER
            )
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        assert [(p.metavar or "").strip("[]") for p in arguments] == list(verb.arguments)
        assert sum(p.required for p in arguments) == verb.least
    shown_global = {p.name for p in program.params}
    assert shown_global | {"help"} == {option.key for option in GLOBAL}


def test_no_verb_has_two_options_of_the_same_name() -> None:
    for verb in VERBS.values():
        names = [name for option in verb.options for name in option.names]
        assert len(names) == len(set(names)), verb.name


def test_every_verb_has_its_function() -> None:
    for verb in VERBS.values():
        module, _, function = verb.work.partition(":")
        assert callable(
            getattr(__import__(f"pyrunc.cli.{module}", fromlist=[function]), function)
        ), verb.name
