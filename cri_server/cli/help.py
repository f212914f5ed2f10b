"""`pyrunc-cri help [VERB]`: prints the same as `--help`."""

from __future__ import annotations

import click


@click.command("help")
@click.argument("words", nargs=-1, metavar="[VERB]...")
@click.pass_context
def help_(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a verb, or the list of verbs."""
    above = context.find_root()
    command: click.Command = above.command
    for word in words:
        subcommand = command.get_command(above, word) if isinstance(command, click.Group) else None
        if subcommand is None:
            raise click.UsageError(f"No such command {' '.join(words)!r}.", context.find_root())
        command, above = subcommand, click.Context(subcommand, info_name=word, parent=above)
    click.echo(command.get_help(above), color=context.color)
