"""`pyrunc-cri config`: the file with all keys, what a server would use and from where, and whether
a file is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from cri_server.cli.server.serve import read, settings
from pyrunc.errors import Error


@click.group()
def config() -> None:
    """The server's configuration: its keys, what they are now and where that comes from."""


@config.command()
def default() -> None:
    """Every key with its explanation and default, as the installed file has them."""
    from cri_server.install.config_file import text

    click.echo(text(), nl=False)


@config.command()
@settings
@click.option(
    "--origin", is_flag=True, help="Beside each value FILE:LINE, default or command line."
)
def dump(config: Path | None, origin: bool, **flags: Any) -> None:
    """What `serve` with the same flags would use, as TOML."""
    import msgspec

    loaded = read(config, flags)
    tables: dict[tuple[str, ...], Any] = {
        (name,): keys for name, keys in msgspec.to_builtins(loaded.config).items()
    }
    tables |= {("runtimes", name): keys for name, keys in tables.pop(("runtimes",)).items()}
    for number, (table, keys) in enumerate(tables.items()):
        click.echo(f"{chr(10) if number else ''}[{'.'.join(table)}]")
        for name, value in keys.items():
            if value is None:  # [containers] has it
                continue
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
            click.echo(f"{line:<50} # {loaded.origin((*table, name))}" if origin else line)


@config.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False), required=False)
def check(file: Path | None) -> None:
    """Whether FILE and its drop-ins can be used [/etc/pyrunc/config.toml]: all unknown keys, wrong
    types and values."""
    from cri_server.config.loader import all_problems
    from cri_server.node import check

    found = all_problems(file, check.problems)
    if len(found) == 1:
        raise found[0]
    for error in found:
        click.echo(str(error), err=True)
    if found:
        raise Error(f"{len(found)} values and keys are wrong")
    for path in read(file, {}).files:
        click.echo(f"{path}: fine")
