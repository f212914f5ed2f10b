"""`pyrunc-cri install-node`: installs the CNI plugins and kubelet's drop-in. Also installs the
files of the Debian package, unless that package is installed."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import click

from pyrunc.errors import Error


@click.command("install-node")
@click.option(
    "--uninstall",
    is_flag=True,
    help="Remove everything that was installed. Refused while there are pods.",
)
@click.option(
    "--purge",
    is_flag=True,
    help="With --uninstall: also remove images, records and a changed configuration.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done.")
@click.option(
    "--kubelet/--no-kubelet",
    default=True,
    show_default=True,
    help="Write a drop-in for a kubelet that systemd runs.",
)
@click.option(
    "--start/--no-start", default=True, show_default=True, help="Enable and start the server."
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default="/",
    show_default=True,
    help="The root of the machine. With a root other than / no command is executed.",
)
def install_node(
    uninstall: bool, purge: bool, dry_run: bool, kubelet: bool, start: bool, root: Path
) -> None:
    """Make this machine a node: install the server's systemd unit, folders, kernel settings, CNI
    plugins, manual pages, completions and a drop-in for kubelet.

    Prints each action. A repeated run only does what is missing. Files of other software are not
    changed. If the server was installed as a package, only the CNI plugins and the drop-in for
    kubelet are installed.
    """
    from cri_server.install import node
    from cri_server.install.actions import KeepFile

    if purge and not uninstall:
        raise click.UsageError("--purge needs --uninstall")
    if os.geteuid() != 0 and not dry_run:
        raise Error(f"install-node needs root, but this is user {os.geteuid()}")
    os.umask(0o022)
    request = node.InstallRequest(
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
        if needed or isinstance(action, KeepFile):
            click.echo(f"{'would ' if dry_run and needed else ''}{action}")
        done += needed
    _print_next_step(done, request.is_live, uninstall)


def command_lines() -> dict[str, click.Group]:
    """Return {command: its click group} for the commands `pyrunc-cri` and `pyrunc`."""
    from cri_server.cli.main import program
    from pyrunc.cli import click_front

    assert isinstance(program, click.Group)
    return {"pyrunc-cri": program, "pyrunc": click_front.program()}


def _link_program(folder: str) -> None:
    """Install the command `pyrunc` into `folder`: a fast-starting executable if there is a C
    compiler, else a Python script."""
    from cri_server.install.actions import RunCommand

    RunCommand((sys.executable, "-m", "pyrunc.cli.entry", "install", folder)).do(Path("/"))


def _print_next_step(done: int, is_live: bool, uninstall: bool) -> None:
    if not done:
        click.echo("nothing to do")
    elif not uninstall and not is_live:
        click.echo("systemd does not run here: start `pyrunc-cri serve` by hand")
