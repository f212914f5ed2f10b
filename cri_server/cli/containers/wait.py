"""`pyrunc-cri wait`: waits until containers have exited and prints their exit codes."""

from __future__ import annotations

import time

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options
from cri_server.cli.connection.client import Client
from cri_server.cli.output.report import for_each

# Servers need not send events of exits, so the status is read again and again.
EXIT_POLL_S = 0.02


@click.command()
@options.names("CONTAINER...", completion.containers)
@click.pass_obj
def wait(address: str, names: tuple[str, ...]) -> None:
    """Wait until containers have exited, and print the exit code of each."""
    with Client(address) as client:
        for_each(
            names,
            lambda name: click.echo(wait_exit(client, client.container(name).id).exit_code),
        )


def wait_exit(client: Client, container: str) -> api.ContainerStatus:
    """Wait until the container with this id has exited, and return its status."""
    while (status := client.container_status(container).status).state != api.CONTAINER_EXITED:
        time.sleep(EXIT_POLL_S)
    return status
