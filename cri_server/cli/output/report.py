"""Prints messages on stderr, chooses exit codes, and runs a verb for each of several names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import click

from pyrunc.errors import VISIBLE, Error, InvalidArgument, InvalidSpec


def report(text: str) -> None:
    """Print an error or a warning on stderr. Escapes control characters, because the text may come
    from an image or a container."""
    visible = "\n".join(line.translate(VISIBLE) for line in text.split("\n"))
    with contextlib.suppress(OSError):
        click.echo(f"pyrunc-cri: {visible}", err=True)


def exit_code(error: Error) -> int:
    """Return the exit code for an error: 2 for a wrong argument on the command line
    (InvalidArgument), 1 for any other error, also for a wrong value in a file (InvalidSpec)."""
    return 2 if isinstance(error, InvalidArgument) and not isinstance(error, InvalidSpec) else 1


def for_each(names: Iterable[str], act: Callable[[str], None]) -> None:
    """Call `act` for each name. With one name, its error is raised. With several names, each error
    is printed and the next name follows; Exit is raised at the end if there was an error."""
    names = list(names)
    failed = False
    for name in names:
        try:
            act(name)
        except Error as error:
            if len(names) == 1:
                raise
            report(str(error))
            failed = True
    if failed:
        raise click.exceptions.Exit(1)
