"""`pyrunc-cri wait`: waits for the end of containers and prints their exit codes."""

from __future__ import annotations

import click

from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.output.complaint import for_each
from cri_server.cli.streams import logs


@click.command()
@click.argument(
    "names", nargs=-1, required=True, metavar="CONTAINER...", shell_complete=completion.containers
)
@click.pass_obj
def wait(address: str, names: tuple[str, ...]) -> None:
    """Wait until containers have exited, and print the exit code of each."""
    with Client(address) as client:
        for_each(
            names,
            lambda name: click.echo(logs.wait_exit(client, client.container(name).id).exit_code),
        )
