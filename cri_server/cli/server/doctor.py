"""`pyrunc-cri doctor`: whether this machine can be a node."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client, socket_path
from cri_server.cli.output import formats
from cri_server.config import load
from cri_server.doctor.examine import examine
from cri_server.doctor.model import Finding, Host, Level
from pyrunc.errors import VISIBLE, Error

ANSWER_S = 3.0
# what a server's verbose status calls its folders -> the keys of its configuration
TOLD = {
    "rootDir": "server.root",
    "stateDir": "server.state",
    "cniConfDir": "network.conf_dir",
    "cniBinDir": "network.bin_dir",
    "netnsDir": "network.netns_dir",
    "missingControllers": "cgroup.missing_controllers",
}
WORDS = {Level.FINE: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.WRONG: "WRONG"}
COLOURS = {Level.FINE: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.WRONG: "red"}


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, readable=False),
    help="The server's [/etc/pyrunc/config.toml]",
)
@click.option("--json", "as_json", is_flag=True, help="An array of all findings.")
@click.option("-a", "--all", "everything", is_flag=True, help="Also what is fine.")
@click.pass_context
def doctor(context: click.Context, config: Path | None, as_json: bool, everything: bool) -> None:
    """Look for what is missing or wrong on this machine, for the server that --address names, and
    say what follows from it and how to mend it.

    Ends with exit code 1 if something is wrong. Changes nothing; as root it mounts an overlay below
    the server's root for a moment.
    """
    logging.getLogger("cri_server").addHandler(logging.NullHandler())  # findings say it all
    findings = list(examine(Host(load(config, _of_server(context)))))
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        _tell(findings, everything)
    if any(finding.level == Level.WRONG for finding in findings):
        context.exit(1)


def _of_server(context: click.Context) -> dict[str, Any]:
    """Where --address names a server: its socket, and its folders as it tells them when it answers."""
    root = context.find_root()
    if root.get_parameter_source("address") in (None, ParameterSource.DEFAULT):
        return {}
    address = f"unix://{socket_path(root.params['address'])}"
    found: dict[str, Any] = {"server.listen": address}
    with contextlib.suppress(Error), Client(address) as client:
        status = formats.with_info(
            client.runtime("Status", api.StatusRequest(verbose=True), ANSWER_S)
        )
        told = (status.get("info") or {}).get("config") or {}
        found |= {key: told[name] for name, key in TOLD.items() if isinstance(told.get(name), str)}
    return found


def _tell(findings: list[Finding], everything: bool) -> None:
    plain = bool(os.environ.get("NO_COLOR"))
    for finding in findings:
        if finding.level == Level.FINE and not everything:
            continue
        word = WORDS[finding.level].ljust(7)
        word = word if plain else click.style(word, fg=COLOURS[finding.level])
        click.echo(f"{word}  {finding.code}: {finding.found.translate(VISIBLE)}")
        for head, text in (("so", finding.follows), ("mend", finding.mend)):
            if text:
                click.echo(f"           {head}: {text}".translate(VISIBLE))
    counts = [
        f"{sum(f.level == level for f in findings)} {word.lower()}" for level, word in WORDS.items()
    ]
    click.echo(", ".join(counts))
