"""`pyrunc-cri`: one click command line. `serve` runs the server, everything else talks to a running one."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import click

import pyrunc
from pyrunc.cli.log import VISIBLE
from pyrunc.errors import Error

# gRPC must not install fork handlers: this process never forks (grpc issues 13998, 32857).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ADDRESS = "unix:///run/pyrunc/cri.sock"


# name on the command line -> module and attribute; imported only when used, for gRPC takes most of the start.
COMMANDS = {
    "run": ("run", "run"),
    "ps": ("listing", "ps"),
    "pods": ("listing", "pods"),
    "logs": ("logs", "logs"),
    "exec": ("execute", "exec_"),
    "stop": ("end", "stop"),
    "rm": ("end", "rm"),
    "image": ("image", "image"),
    "serve": ("serve", "serve"),
    "demo": ("demo", "demo"),
    "demo-server": ("demo", "demo_server"),
}


class Commands(click.Group):
    """The commands of the table."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name]
        found: click.Command = getattr(importlib.import_module(f"cri_server.cli.{module}"), attribute)
        return found


@click.command(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PYRUNC_CRI"}
)
@click.version_option(pyrunc.__version__, prog_name="pyrunc-cri")
@click.option(
    "--address",
    default=ADDRESS,
    show_default=True,
    envvar="PYRUNC_CRI_ADDRESS",
    help="The socket of the running server.",
)
@click.pass_context
def program(context: click.Context, address: str) -> None:
    """A container runtime for Kubernetes, and for you."""
    context.obj = address


def main() -> None:
    """The entry point: errors of ours are one line and exit code 1."""
    try:
        program(standalone_mode=False)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Error as error:
        lines = str(error).split("\n")  # they may quote an image or a container
        click.echo("pyrunc-cri: " + "\n".join(line.translate(VISIBLE) for line in lines), err=True)
        sys.exit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    main()
