"""Builds click commands from the table of verbs, for help texts and for the verbs that only people
type. Importing click takes 25 ms, so the fast verbs avoid it."""

from __future__ import annotations

import sys
from typing import Any

import click

import pyrunc
from pyrunc.cli import fast
from pyrunc.cli.parse import CommandLine
from pyrunc.cli.table import FLAG, GLOBAL, LIST, NUMBER, TRISTATE, VERBS, Option, Verb

FLAGS = (FLAG, TRISTATE)
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def program() -> click.Group:
    """Build the whole command line as click commands."""
    group = click.Group(
        "pyrunc",
        help="An OCI container runtime. `pyrunc COMMAND --help` describes one command.",
        params=[_option(option) for option in GLOBAL if option.names[0] not in ("help", "version")]
        + [click.Option(["-v", "--version"], is_flag=True, help="print the version")],
        context_settings=CONTEXT,
        epilog=f"pyrunc {pyrunc.__version__}",
    )
    for verb in VERBS.values():
        group.add_command(_command(verb))
    return group


def run(call: CommandLine) -> int:
    """Show help if the command line has --help or, as runc does, if it has no verb. Otherwise run
    the verb. (`fast` verbs run without this module.) Returns the exit code."""
    if call.verb is not None and not call.help:
        return fast.do(call)
    words = ["--help"] if call.verb is None else [call.verb.name, "--help"]
    try:
        # With standalone_mode click would end the process itself, with 2 for a wrong command line;
        # runc's code is 1.
        program().main(words, prog_name="pyrunc", standalone_mode=False)
    except click.exceptions.Exit as end:
        return int(end.exit_code)
    except click.ClickException as error:
        print(f"pyrunc: {error.format_message()}", file=sys.stderr)
        return fast.FAILED
    return 0


def _command(verb: Verb) -> click.Command:
    arguments: list[click.Parameter] = []
    for index, name in enumerate(verb.arguments):
        count = -1 if name.endswith("...") else 1
        required = index < verb.least
        metavar = name if required else f"[{name}]"
        identifier = name.rstrip(".").lower().replace("-", "_")
        arguments.append(
            click.Argument([identifier], nargs=count, required=required, metavar=metavar)
        )
    return click.Command(
        verb.name,
        help=verb.help,
        short_help=verb.help,
        params=[*(_option(option) for option in verb.options), *arguments],
        context_settings=CONTEXT | {"allow_interspersed_args": not verb.leading},
    )


def _option(option: Option) -> click.Option:
    names = [f"--{option.names[0]}", *(f"-{name}" for name in option.names[1:])]
    keywords: dict[str, Any] = {
        "help": option.help,
        "show_default": option.kind not in FLAGS and bool(option.default),
    }
    if option.kind in FLAGS:
        keywords["is_flag"] = True
    elif option.kind == LIST:
        keywords["multiple"] = True
    elif option.kind == NUMBER:
        keywords["type"] = int
    if option.kind not in (*FLAGS, LIST):
        keywords["default"] = option.default
    if option.metavar:
        keywords["metavar"] = option.metavar
    return click.Option(names, **keywords)
