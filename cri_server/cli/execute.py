"""`pyrunc-cri exec` and `attach`: a command in a container, or the container's own process, with its streams on ours.

Never ExecSync: that answers when the command has ended, and with no more than a message's 16 MiB of its output.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, logs, session, show
from cri_server.cli.client import Client

VALUED = frozenset(("-n", "--namespace", "-c", "--container", "--timeout"))
# options of nerdctl's and podman's exec that CRI's ExecRequest has no field for -> how a command does the same itself
NOT_IN_CRI: dict[tuple[str, ...], str] = {
    ("-u", "--user"): "su USER -c COMMAND",
    ("-e", "--env"): "env NAME=VALUE COMMAND",
    ("-w", "--workdir"): "sh -c 'cd DIR && exec COMMAND'",
}


def _refuse_option(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        instead = NOT_IN_CRI[tuple(parameter.opts)]
        raise click.UsageError(f"{'/'.join(parameter.opts)}: CRI's exec has no such field; use {instead}")


def _refused_options(command: Any) -> Any:
    for names in NOT_IN_CRI:
        command = click.option(*names, hidden=True, expose_value=False, callback=_refuse_option)(command)
    return command


class _Exec(click.Command):
    """Takes options before CONTAINER, and as kubectl also between CONTAINER and `--`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, _options_first(args))


def _options_first(args: list[str]) -> list[str]:
    """`POD -c NAME -- COMMAND` as `-c NAME POD -- COMMAND`; anything else as it is, such as `POD sh -c TEXT -- ARGUMENT`."""
    if "--" not in args:
        return args
    head, rest = args[: args.index("--")], args[args.index("--") :]
    options: list[str] = []
    others: list[str] = []
    words = iter(head)
    for word in words:
        if word in VALUED:
            options += [word, *itertools.islice(words, 1)]
        else:
            (options if word.startswith("-") else others).append(word)
    return [*options, *others, *rest] if len(others) == 1 else args


@click.command(cls=_Exec, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-i", "--stdin", "--interactive", is_flag=True, help="Pass our stdin on.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.option(
    "-n", "--namespace", default="", metavar="NAMESPACE", help="CONTAINER is a pod in it, as kubectl has it."
)
@click.option(
    "-c", "--container", "of_pod", default="", metavar="NAME", help="CONTAINER is a pod, this its container."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=0,
    metavar="SECONDS",
    help="End the command after so long. [0: never]",
)
@_refused_options
@click.argument("container", shell_complete=completion.both)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.pass_obj
def exec_(
    address: str,
    stdin: bool,
    tty: bool,
    namespace: str,
    of_pod: str,
    timeout_s: float,
    container: str,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND in CONTAINER (an id, a name, POD/NAME, NAMESPACE/POD/NAME, or a pod's name); exits with its code."""
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise click.UsageError("Missing argument 'COMMAND'.")
    if stdin and tty and not sys.stdin.isatty():
        # As kubectl: what is piped into a terminal has no end that a command would see.
        click.echo("pyrunc-cri: stdin is not a terminal: -t is ignored", err=True)
        tty = False
    reference = "/".join(filter(None, (namespace, container, of_pod)))
    with Client(address) as client:
        identifier = client.container(reference).id
        request = api.ExecRequest(
            container_id=identifier, cmd=command, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = client.runtime("Exec", request).url
    sys.exit(session.run(url, stdin=stdin, tty=tty, timeout_s=timeout_s))


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
