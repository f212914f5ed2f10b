"""`pyrunc-cri exec` and `attach`: run a command in a container, or connect to the container's main
process, with the stdin, stdout and stderr of this terminal.

`exec` does not use ExecSync, which replies only after the command has ended and with at most 16 MiB
of output.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.output import show
from cri_server.cli.output.report import report
from cri_server.cli.streams import logs, session
from cri_server.rpc import private
from pyrunc.errors import InvalidArgument, KernelError, NotFound
from pyrunc.kernel.path import read_in_root


def _variable(text: str) -> str:
    """Parse NAME=VALUE; NAME alone takes the value of this process's environment, as in docker.
    Raises InvalidArgument."""
    name, equals, _ = text.partition("=")
    if name and (equals or name in os.environ):
        return text if equals else f"{name}={os.environ[name]}"
    raise InvalidArgument(
        f"--env {text}: expected NAME=VALUE, or the name of a variable of this environment"
    )


def _user(client: Client, container: str, text: str) -> dict[str, object]:
    """Look up USER[:GROUP] in the container's passwd and group files. Returns the ids, as the field
    `user` of an OCI process. Raises InvalidArgument, WrongState."""
    from cri_server.cli.containers.container_root import open_root
    from cri_server.spec.user import Accounts, resolve

    # CRI's ExecRequest has no user, so the names are looked up here.
    with open_root(client, container, container[: show.SHORT]) as root:
        files = [_read(root.descriptor, path) for path in ("/etc/passwd", "/etc/group")]
    user = resolve(api.LinuxContainerSecurityContext(), text, Accounts.parse(*files))
    return {"uid": user.uid, "gid": user.gid, "additionalGids": list(user.groups)}


def _read(root: int, path: str) -> bytes:
    """Return the content of a regular file of a container; no bytes if the file is missing or of
    another kind. Symbolic links are resolved inside `root`, a descriptor of the container's root
    directory."""
    try:
        return read_in_root(root, path)
    except (KernelError, NotFound):
        return b""


class _Exec(click.Command):
    """The command `exec`. Like kubectl, it accepts its options before CONTAINER and between
    CONTAINER and `--`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        options = [each for each in self.params if isinstance(each, click.Option)]
        with_values = {name for each in options if not each.is_flag for name in each.opts}
        return super().parse_args(context, _options_first(args, with_values))


def _options_first(args: list[str], with_values: Collection[str]) -> list[str]:
    """Turn `POD -c NAME -- COMMAND` into `-c NAME POD -- COMMAND`. Anything else stays unchanged,
    such as `POD sh -c TEXT -- ARGUMENT`. `with_values`: the options that take a value."""
    if "--" not in args:
        return args
    head, rest = args[: args.index("--")], args[args.index("--") :]
    options: list[str] = []
    others: list[str] = []
    arguments = iter(head)
    for argument in arguments:
        if argument in with_values:
            options += [argument, *itertools.islice(arguments, 1)]
        else:
            (options if argument.startswith("-") else others).append(argument)
    return [*options, *others, *rest] if len(others) == 1 else args


@click.command(
    cls=_Exec, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-i", "--stdin", "--interactive", is_flag=True, help="Pass stdin to the command.")
@click.option("-t", "--tty", is_flag=True, help="Run the command on a terminal.")
@click.option(
    "-n",
    "--namespace",
    default="",
    metavar="NAMESPACE",
    help="CONTAINER is a pod of this namespace, as in kubectl.",
)
@logs.container_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    default=0,
    metavar="SECONDS",
    help="End the command after this time. [0: never]",
)
@click.option(
    "-u", "--user", default="", metavar="USER[:GROUP]", help="The user, by name or number."
)
@click.option(
    "-e", "--env", multiple=True, metavar="NAME=VALUE", help="Set a variable; may be repeated."
)
@click.option("-w", "--workdir", default="", metavar="DIR", help="The working directory.")
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
    container_of_pod: str,
    timeout_s: float,
    user: str,
    env: tuple[str, ...],
    workdir: str,
    container: str,
    command: tuple[str, ...],
) -> None:  # fmt: skip
    """Run COMMAND in CONTAINER and exit with the code of COMMAND.

    CONTAINER is an id, NAME, POD/NAME, NAMESPACE/POD/NAME, or the name of a pod with one container.
    """
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise click.UsageError("Missing argument 'COMMAND'.")
    if stdin and tty and not sys.stdin.isatty():
        # As in kubectl: a command on a terminal would not see the end of piped input.
        report("stdin is not a terminal: -t is ignored")
        tty = False
    reference = "/".join(filter(None, (namespace, container, container_of_pod)))
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
            url = client.admin(changed, private.SessionUrl).url
        else:
            request = api.ExecRequest(
                container_id=identifier,
                cmd=command,
                stdin=stdin,
                stdout=True,
                stderr=not tty,
                tty=tty,
            )
            url = client.call(request).url
    sys.exit(session.run(url, stdin=stdin, tty=tty, timeout_s=timeout_s))


@click.command()
@click.option("-i", "--stdin", is_flag=True, help="Pass stdin to the container.")
@click.option(
    "-t",
    "--tty",
    is_flag=True,
    help="The container has a terminal. [by default as the server reports]",
)
@click.option(
    "--detach-keys",
    default=session.DETACH_KEYS,
    show_default=True,
    help="Keys that end the session and leave the container running.",
)
@click.argument("container", shell_complete=completion.both)
@click.pass_obj
def attach(address: str, stdin: bool, tty: bool, detach_keys: str, container: str) -> None:
    """Connect this terminal to the main process of CONTAINER: show its stdout and stderr, and with
    --stdin pass stdin to it.

    CONTAINER is an id, NAME, POD/NAME, NAMESPACE/POD/NAME, or the name of a pod with one container.
    If the container exits during the session, `attach` exits with the code of the container.
    """
    keys = session.parse_keys(detach_keys)
    with Client(address) as client:
        identifier = client.container(container).id
        # CRI's ContainerStatus does not say whether the container has a terminal.
        spec = client.container_info(identifier).get("runtimeSpec") or {}
        tty = tty or bool((spec.get("process") or {}).get("terminal"))
        request = api.AttachRequest(
            container_id=identifier, stdin=stdin, stdout=True, stderr=not tty, tty=tty
        )
        url = client.call(request).url
        try:
            code = session.run(url, stdin=stdin, tty=tty, detach_keys=keys)
        except session.Detached:
            return
        status = client.container_status(identifier).status
    sys.exit(status.exit_code if status.state == api.CONTAINER_EXITED else code)
