"""Arguments and options that several verbs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cri_server.cli.arguments.completion import Completer


def names(metavar: str, complete: Completer, *, required: bool = True) -> Callable[[Any], Any]:
    """Return a click decorator that gives a verb an argument of several names, passed to its
    function as `names`. `metavar` is shown in the help; `complete` completes a name."""
    return click.argument(
        "names", nargs=-1, required=required, metavar=metavar, shell_complete=complete
    )


def labels(text: str) -> Callable[[Any], Any]:
    """Return a click decorator that gives a verb the option --label, passed to its function as
    `labels` (the selectors' texts). `text` is the option's help."""
    return click.option(
        *("--label", "--selector", "labels"), multiple=True, metavar="SELECTOR", help=text
    )


def add(
    *options: Callable[[Any], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds several options to a command, in the order of its help."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
