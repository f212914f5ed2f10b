"""`pyrunc-cri exec` and `attach`: a command in a container, or the container's own process, with
its streams on ours.

Never ExecSync: that answers when the command has ended, and with no more than a message's 16 MiB of
its output.
"""

from __future__ import annotations

import itertools
import os
import sys

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.output import show
from cri_server.cli.streams import logs, session
from cri_server.rpc import private
from pyrunc.errors import InvalidArgument, KernelError, NotFound
from pyrunc.kernel.path import read_in_root

# options of `exec` that take a value
VALUED = frozenset(
    (
        "-n",
        "--namespace",
        "-c",
        "--container",
        "--timeout",
        "-u",
        "--user",
        "-e",
        "--env",
        "-w",
        "--workdir",
    )
)


def _variable(text: str) -> str:
    """NAME=VALUE; of NAME alone the value is ours, as docker has it. Raises InvalidArgument."""
    name, equals, _ = text.partition("=")
    if name and (equals or name in os.environ):
        return text if equals else f"{name}={os.environ[name]}"
    raise InvalidArgument(
        f"--env {text}: expected NAME=VALUE, or the name of a variable that is set here"
    )


def _user(client: Client, container: str, text: str) -> dict[str, object]:
    """USER[:GROUP] by the container's own passwd and group files. Raises InvalidArgument,
    WrongState."""
    from cri_server.cli.containers.container_root import ContainerRoot
    from cri_server.spec.user import Accounts, resolve

    with ContainerRoot(client, container, container[: show.SHORT]) as root:
        files = [_read(root.descriptor, path) for path in ("/etc/passwd", "/etc/group")]
    who = resolve(api.LinuxContainerSecurityContext(), text, Accounts.parse(*files))
    return {"uid": who.uid, "gid": who.gid, "additionalGids": list(who.groups)}


def _read(root: int, path: str) -> bytes:
    """A regular file in `root`, where its links point as the container sees them; empty for
    anything else."""
    try:
        return read_in_root(root, path)
    except (KernelError, NotFound):
        return b""


class _Exec(click.Command):
    """Takes options before CONTAINER, and as kubectl also between CONTAINER and `--`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, _options_first(args))


def _options_first(args: list[str]) -> list[str]:
    """`POD -c NAME -- COMMAND` as `-c NAME POD -- COMMAND`; anything else as it is, such as `POD sh
    -c TEXT -- ARGUMENT`."""
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


@click.command(
    cls=_Exec, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-i", "--stdin", "--interactive", is_flag=True, help="Pass our stdin on.")
@click.option("-t", "--tty", is_flag=True, help="Give the command a terminal.")
@click.option(
    "-n",
    "--namespace",
    default="",
    metavar="NAMESPACE",
    help="CONTAINER is a pod in it, as kubectl has it.",
)
@click.option(
    "-c",
    "--container",
    "of_pod",
    default="",
    metavar="NAME",
    help="CONTAINER is a pod, this its container.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=0,
    metavar="SECONDS",
    help="End the command after so long. [0: never]",
)
@click.option(
    "-u", "--user", default="", metavar="USER[:GROUP]", help="As this user, a name or a number."
)
@click.option(
    "-e", "--env", multiple=True, metavar="NAME=VALUE", help="Another variable; may be repeated."
)
@click.option("-w", "--workdir", default="", metavar="DIR", help="In this directory.")
@click.argument("container", shell_complete=completion.both)
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND..."
)
@click.pass_obj
def exec_(
    address: str,
    stdin: bool,
    tty: bool,
    namespace: str,
    of_pod: str,
    timeout_s: float,
    user: str,
    env: tuple[str, ...],
    workdir: str,
    container: str,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND in CONTAINER (an id, a name, POD/NAME, NAMESPACE/POD/NAME, or a pod's name);
    exits with its code."""
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
        if user or env or workdir:
            changed = private.ExecAs(
                identifier,
                list(command),
                stdin,
                tty,
                _user(client, identifier, user) if user else None,
                [_variable(text) for text in env],
                workdir,
            )
            url = client.admin(changed, private.Session).url
        else:
            request = api.ExecRequest(
                container_id=identifier,
                cmd=command,
                stdin=stdin,
                stdout=True,
                stderr=not tty,
                tty=tty,
            )
            url = client.runtime("Exec", request).url
    sys.exit(session.run(url, stdin=stdin, tty=tty, timeout_s=timeout_s))


@click.command()
@click.option("-i", "--stdin", is_flag=True, help="Pass our stdin on.")
@click.option(
    "-t",
    "--tty",
    is_flag=True,
    help="The container has a terminal. [found out where the server tells]",
)
@click.option(
    "--detach-keys",
    default=session.DETACH_KEYS,
    show_default=True,
    help="Keys that leave it running.",
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
