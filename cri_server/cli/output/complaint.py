"""Errors on stderr, one line each; and verbs that do the same to several things."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import click

from pyrunc.errors import VISIBLE, Error, InvalidArgument, InvalidSpec


def complain(text: str) -> None:
    """An error on stderr, without control characters: it may quote an image or a container."""
    shown = "\n".join(line.translate(VISIBLE) for line in text.split("\n"))
    with contextlib.suppress(OSError):
        click.echo(f"pyrunc-cri: {shown}", err=True)


def exit_code(error: Error) -> int:
    """2 for a wrong value on the command line, 1 for what else fails; what is wrong in a file is
    not the command line's."""
    return 2 if isinstance(error, InvalidArgument) and not isinstance(error, InvalidSpec) else 1


def each(names: Iterable[str], act: Callable[[str], None]) -> None:
    """Do it to each; what fails does not keep the others from it. Raises the only error, or Exit
    when there were several names."""
    names = list(names)
    failed = False
    for name in names:
        try:
            act(name)
        except Error as error:
            if len(names) == 1:
                raise
            complain(str(error))
            failed = True
    if failed:
        raise click.exceptions.Exit(1)
