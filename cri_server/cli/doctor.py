"""`pyrunc-cri doctor`: whether this machine can be a node."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import click

from cri_server.config import load
from cri_server.doctor.examine import examine
from cri_server.doctor.model import Finding, Host, Level
from pyrunc.errors import VISIBLE

WORDS = {Level.FINE: "ok", Level.NOTE: "note", Level.WARNING: "warning", Level.WRONG: "WRONG"}
COLOURS = {Level.FINE: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.WRONG: "red"}


@click.command()
@click.option(
    "--config", type=click.Path(path_type=Path, readable=False), help="The server's [/etc/pyrunc/config.toml]"
)
@click.option("--json", "as_json", is_flag=True, help="An array of all findings.")
@click.option("-a", "--all", "everything", is_flag=True, help="Also what is fine.")
@click.pass_context
def doctor(context: click.Context, config: Path | None, as_json: bool, everything: bool) -> None:
    """Look for what is missing or wrong on this machine, and say what follows from it and how to mend it.

    Ends with exit code 1 if something is wrong. Changes nothing; as root it mounts an overlay below the server's root for a
    moment.
    """
    logging.getLogger("cri_server").addHandler(logging.NullHandler())  # findings say it all
    findings = list(examine(Host(load(config, {}))))
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=1))
    else:
        _tell(findings, everything)
    if any(finding.level == Level.WRONG for finding in findings):
        context.exit(1)


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
    counts = [f"{sum(f.level == level for f in findings)} {word.lower()}" for level, word in WORDS.items()]
    click.echo(", ".join(counts))
