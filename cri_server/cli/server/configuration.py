"""`pyrunc-cri config`: prints all configuration keys, prints the effective values with their
origins, and checks a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cri_server.cli.arguments.files import FILE
from cri_server.cli.server.serve import read, settings
from pyrunc.errors import Error


@click.group()
def config() -> None:
    """Show and check the configuration of the server."""


@config.command()
def default() -> None:
    """Print all keys with explanations and defaults, as in the installed file."""
    from cri_server.install.config_file import text

    click.echo(text(), nl=False)


@config.command()
@settings
@click.option("--origin", is_flag=True, help="Add the origin: FILE:LINE, default or command line.")
def dump(config: Path | None, origin: bool, **flags: Any) -> None:
    """Print the configuration that `serve` would use with the same flags, as TOML."""
    import msgspec

    loaded = read(config, flags)
    tables: dict[tuple[str, ...], Any] = {
        (name,): keys for name, keys in msgspec.to_builtins(loaded.config).items()
    }
    tables |= {("runtimes", name): keys for name, keys in tables.pop(("runtimes",)).items()}
    for number, (table, keys) in enumerate(tables.items()):
        click.echo(f"{chr(10) if number else ''}[{'.'.join(table)}]")
        for name, value in keys.items():
            if value is None:  # then the key of [containers] counts
                continue
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
            click.echo(f"{line:<50} # {loaded.origin((*table, name))}" if origin else line)


@config.command()
@click.argument("file", type=FILE, required=False)
def check(file: Path | None) -> None:
    """Check FILE, by default /etc/pyrunc/config.toml, and its drop-ins in FILE.d for unknown keys,
    wrong types and wrong values."""
    from cri_server.config.loader import all_problems
    from cri_server.node import check

    problems = all_problems(file, check.problems)
    if len(problems) == 1:
        raise problems[0]
    for error in problems:
        click.echo(str(error), err=True)
    if problems:
        raise Error(f"{len(problems)} keys or values are wrong")
    for path in read(file, {}).files:
        click.echo(f"{path}: ok")
