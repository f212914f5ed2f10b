"""`pyrunc-cri exec` and `attach`: a command in a container, or the container's own process, with its streams on ours.

Never ExecSync: that answers when the command has ended, and with no more than a message's 16 MiB of its output.
"""

from __future__ import annotations

import sys

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, logs, session, show
from cri_server.cli.client import Client


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-i", "--stdin", "--interactive", is_flag=True, help="Pass our stdin on.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.argument("container", shell_complete=completion.both)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def exec_(address: str, stdin: bool, tty: bool, container: str, command: tuple[str, ...]) -> None:
    """Run COMMAND in CONTAINER (an id, a name, POD/NAME, or a pod's name); exits with its code."""
    with Client(address) as client:
        identifier = client.container(container).id
        request = api.ExecRequest(
            container_id=identifier, cmd=command, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = client.runtime("Exec", request).url
    sys.exit(session.run(url, stdin=stdin, tty=tty))


@click.command()
@click.option("-i", "--stdin", is_flag=True, help="Pass our stdin on.")
@click.option(
    "-t", "--tty", is_flag=True, help="The container has a terminal. [found out where the server tells]"
)
@click.option(
    "--detach-keys", default=session.DETACH_KEYS, show_default=True, help="Keys that leave it running."
)
@click.argument("container", shell_complete=completion.both)
@click.pass_obj
def attach(address: str, stdin: bool, tty: bool, detach_keys: str, container: str) -> None:
    """Join the streams of CONTAINER's own process; exits with its code when it ends meanwhile."""
    keys = session.parse_keys(detach_keys)
    with Client(address) as client:
        identifier = client.container(container).id
        spec = show.container_info(client, identifier).get("runtimeSpec") or {}
        tty = tty or bool((spec.get("process") or {}).get("terminal"))
        request = api.AttachRequest(
            container_id=identifier, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = client.runtime("Attach", request).url
        try:
            code = session.run(url, stdin=stdin, tty=tty, detach_keys=keys)
        except session.Detached:
            return
        status = logs.status(client, identifier)
    sys.exit(status.exit_code if status.state == api.CONTAINER_EXITED else code)
