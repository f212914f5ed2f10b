"""Arguments and options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cri_server.cli.arguments.completion import Completer


def names(metavar: str, complete: Completer, *, required: bool = True) -> Callable[[Any], Any]:
    """Return a click decorator for an argument that takes several names; a verb's function gets
    them as `names`. `metavar`: the argument in the help; `complete`: the completer of a name."""
    return click.argument(
        "names", nargs=-1, required=required, metavar=metavar, shell_complete=complete
    )


def labels(text: str) -> Callable[[Any], Any]:
    """Return a click decorator for the option --label; a verb's function gets the list of selectors
    as `labels`. `text` is the option's help."""
    return click.option(
        *("--label", "--selector", "labels"), multiple=True, metavar="SELECTOR", help=text
    )


def add(
    *options: Callable[[Any], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return one decorator that adds all `options` to a command. The help lists them in this
    order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
