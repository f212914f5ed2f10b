"""`pyrunc-cri gc`: removes unused files from the server's disk, and tells why it keeps the other
files."""

from __future__ import annotations

import json

import click

from cri_server.cli.connection.client import Client
from cri_server.cli.output import formats
from cri_server.cli.output.show import size
from cri_server.rpc import private

ORDER = ("failed", "removed", "remove", "converted", "convert", "keep")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option(
    "--images",
    is_flag=True,
    help="Also remove images that no container uses and that are not pinned.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Also release addresses of lost pods whose network plugins fail or are missing.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print all items with action, reason and size as an array.",
)
@click.pass_context
def gc(context: click.Context, dry_run: bool, images: bool, force: bool, as_json: bool) -> None:
    """Remove unused files from the server's disk. The output also lists what is kept, with the
    reason.

    Images that no container uses are converted to the storage format that `[images] store` names,
    without a download. Only --images removes images. Pods and containers are never removed.

    The exit code is 1 if something could not be removed or converted.
    """
    with Client(context.obj) as client:
        report = client.admin(
            private.CollectGarbage(dry_run, images, force), private.GarbageItems, None
        ).items
    items = sorted(report, key=lambda item: ORDER.index(item.action))
    if as_json:
        click.echo(json.dumps([item.to_fields() for item in items], indent=1))
    else:
        rows = [
            (i.action, i.kind, size(i.size_bytes) if i.size_bytes else "-", i.name, i.why)
            for i in items
        ]
        if rows:
            formats.say(formats.table(("ACTION", "KIND", "SIZE", "NAME", "WHY"), rows))
        gone = [item for item in items if item.action in ("remove", "removed")]
        verb = "would be removed" if dry_run else "removed"
        click.echo(
            f"{len(gone)} item{'' if len(gone) == 1 else 's'} {verb}:"
            f" {size(sum(i.size_bytes for i in gone))}"
        )
    if any(item.action == "failed" for item in items):
        context.exit(1)
