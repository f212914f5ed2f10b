"""`pyrunc-cri doctor`: checks whether this machine can be a node."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments.files import FILE
from cri_server.cli.connection.client import Client, socket_path
from cri_server.cli.output import formats
from cri_server.config import load
from cri_server.doctor.examine import examine
from cri_server.doctor.model import CheckResult, Level, Machine
from pyrunc.errors import VISIBLE, Error

ANSWER_S = 3.0
# fields of a server's verbose status -> keys of its configuration
STATUS_FIELDS = {
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
@click.option("--config", type=FILE, help="The server's configuration. [/etc/pyrunc/config.toml]")
@click.option("--json", "as_json", is_flag=True, help="Print all results as a JSON array.")
@click.option("-a", "--all", "show_fine", is_flag=True, help="Also print checks that passed.")
@click.pass_context
def doctor(context: click.Context, config: Path | None, as_json: bool, show_fine: bool) -> None:
    """Check whether this machine has missing or wrong settings for the server that --address names.
    Each result names the effect and a remedy.

    The exit code is 1 if something is wrong. Doctor changes no setting. Run as root, it also mounts
    an overlay below the directory `server.root`, and removes the overlay again.
    """
    # The log stays silent: the results say the same.
    logging.getLogger("cri_server").addHandler(logging.NullHandler())
    results = list(examine(Machine(load(config, _of_server(context)))))
    if as_json:
        click.echo(json.dumps([result.to_json() for result in results], indent=1))
    else:
        _print(results, show_fine)
    if any(result.level == Level.WRONG for result in results):
        context.exit(1)


def _of_server(context: click.Context) -> dict[str, Any]:
    """Return settings of the server that --address names, as {`table.key`: value}: its socket and,
    if the server answers, its directories and `cgroup.missing_controllers`. Returns no settings
    if no address is given."""
    root = context.find_root()
    if root.get_parameter_source("address") in (None, ParameterSource.DEFAULT):
        return {}
    address = f"unix://{socket_path(root.params['address'])}"
    settings: dict[str, Any] = {"server.listen": address}
    with contextlib.suppress(Error), Client(address) as client:
        status = formats.with_info(client.call(api.StatusRequest(verbose=True), ANSWER_S))
        info = (status.get("info") or {}).get("config") or {}
        for name, key in STATUS_FIELDS.items():
            if isinstance(info.get(name), str):
                settings[key] = info[name]
    return settings


def _print(results: list[CheckResult], show_fine: bool) -> None:
    """Print the results, then the number of results of each level."""
    for result in results:
        if result.level == Level.FINE and not show_fine:
            continue
        word = click.style(WORDS[result.level].ljust(7), fg=COLOURS[result.level])
        formats.say(f"{word}  {result.code}: {result.observation.translate(VISIBLE)}")
        for head, text in (("so", result.effect), ("mend", result.remedy)):
            if text:
                click.echo(f"           {head}: {text}".translate(VISIBLE))
    counts = [
        f"{sum(f.level == level for f in results)} {word.lower()}" for level, word in WORDS.items()
    ]
    click.echo(", ".join(counts))
