"""`pyrunc-cri install-node`: what a package does, for those without one; and kubelet's part, for
all."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import click

from pyrunc.errors import Error


@click.command("install-node")
@click.option(
    "--uninstall",
    is_flag=True,
    help="Take everything back that was installed; refused while there are pods.",
)
@click.option(
    "--purge",
    is_flag=True,
    help="With --uninstall: also images, records and a changed configuration.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option(
    "--kubelet/--no-kubelet",
    default=True,
    show_default=True,
    help="A drop-in for a kubelet that systemd runs.",
)
@click.option(
    "--start/--no-start", default=True, show_default=True, help="Enable and start the server."
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default="/",
    show_default=True,
    help="The machine's root; with another one no command is run.",
)
def install_node(
    uninstall: bool, purge: bool, dry_run: bool, kubelet: bool, start: bool, root: Path
) -> None:
    """Make this machine a node: unit, folders, kernel settings, CNI plugins, manual pages,
    completions, kubelet's drop-in.

    Prints what it does, one line each; done again, it does only what is missing. Files that are
    another's stay as they are. Where a package has installed the server, only the CNI plugins and
    kubelet's drop-in are left to do.
    """
    from cri_server.install import node
    from cri_server.install.actions import Keep

    if purge and not uninstall:
        raise click.UsageError("--purge goes with --uninstall")
    if os.geteuid() != 0 and not dry_run:
        raise Error(f"installing needs root, this is user {os.geteuid()}")
    os.umask(0o022)
    request = node.Request(
        root.resolve(),
        None if node.is_packaged() else sysconfig.get_path("scripts"),
        command_lines(),
        kubelet,
        start,
    )
    if uninstall:
        actions = node.uninstall_actions(request, purge)
    else:
        actions = node.install_actions(request)
        if request.scripts is not None and request.root == Path("/") and not dry_run:
            _link_program(request.scripts)
    done = 0
    for action, needed in node.carry_out(request.root, actions, dry_run):
        if needed or isinstance(action, Keep):
            click.echo(f"{'would ' if dry_run and needed else ''}{action}")
        done += needed
    _say_what_is_left(done, request.is_live, uninstall)


def command_lines() -> dict[str, click.Group]:
    """Each program's name and commands."""
    from cri_server.cli.main import program
    from pyrunc.cli import click_front

    assert isinstance(program, click.Group)
    return {"pyrunc-cri": program, "pyrunc": click_front.program()}


def _link_program(folder: str) -> None:
    """`pyrunc` as a program that starts fast, where there is a compiler (pyrunc/cli/entry.py); else
    a script."""
    command = [sys.executable, "-m", "pyrunc.cli.entry", "install", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Error(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")


def _say_what_is_left(done: int, is_live: bool, uninstall: bool) -> None:
    if not done:
        click.echo("nothing to do")
    elif not uninstall and not is_live:
        click.echo("no systemd runs here: start `pyrunc-cri serve` yourself")
