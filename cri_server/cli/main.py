"""`pyrunc-cri`: one click command line. `serve` runs the server, everything else talks to a running one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

import pyrunc
from cri_server.cli import serve
from pyrunc.errors import Error

# gRPC must not install fork handlers: this process never forks (grpc issues 13998, 32857).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ADDRESS = "unix:///run/pyrunc/cri.sock"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PYRUNC_CRI"})
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


program.add_command(serve.serve)


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
        click.echo(f"pyrunc-cri: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    main()
