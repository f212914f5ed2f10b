"""Errors on stderr, one line each; and verbs that do the same to several things."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import click

from pyrunc.errors import VISIBLE, Error


def complain(text: str) -> None:
    """An error on stderr, without control characters: it may quote an image or a container."""
    shown = "\n".join(line.translate(VISIBLE) for line in text.split("\n"))
    with contextlib.suppress(OSError):
        click.echo(f"pyrunc-cri: {shown}", err=True)


def each(names: Iterable[str], act: Callable[[str], None]) -> None:
    """Do it to each; what fails does not keep the others from it. Raises the only error, or Exit when there were several names."""
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
