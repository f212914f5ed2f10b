"""`pyrunc-cri pause` and `unpause`: freeze and thaw the processes of containers."""

from __future__ import annotations

import click

from cri_server.cli.arguments import completion, options, ownership
from cri_server.cli.connection.client import Client
from cri_server.cli.containers import stop
from cri_server.cli.output.report import for_each
from cri_server.rpc import private
from pyrunc.errors import WrongState


@click.command()
@options.names("CONTAINER|POD...", completion.both)
@click.option("-f", "--force", is_flag=True, help="Do not ask about containers of kubelet.")
@click.pass_obj
def pause(address: str, names: tuple[str, ...], force: bool) -> None:
    """Freeze containers, or all containers of pods. The processes keep their memory but do not run
    until `unpause`. `stop` also ends paused containers."""
    with Client(address) as client:
        for_each(names, lambda name: _call(client, name, private.PauseContainer, force))


@click.command()
@options.names("CONTAINER|POD...", completion.both)
@click.pass_obj
def unpause(address: str, names: tuple[str, ...]) -> None:
    """Thaw paused containers, or all paused containers of pods."""
    with Client(address) as client:
        for_each(names, lambda name: _call(client, name, private.UnpauseContainer, True))


def _call(
    client: Client,
    name: str,
    kind: type[private.PauseContainer | private.UnpauseContainer],
    force: bool,
) -> None:
    target = stop.find(client, name)
    ownership.permit(kind.call.removesuffix("Container").lower(), name, target.labels, force=force)
    if not target.running:
        raise WrongState(f"{name} is not running")
    paused = client.paused() if target.is_pod else frozenset()
    for container in target.running:
        if not target.is_pod or (container.id in paused) == (kind is private.UnpauseContainer):
            client.admin(kind(container.id), private.Empty)
    click.echo(name)
