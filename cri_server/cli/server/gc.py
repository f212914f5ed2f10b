"""`pyrunc-cri gc`: what is on disk for nobody goes, and why the rest stays."""

from __future__ import annotations

import json

import click

from cri_server.cli.connection.client import Client
from cri_server.cli.output import formats
from cri_server.cli.output.show import size
from cri_server.rpc import private

ORDER = ("failed", "removed", "remove", "converted", "convert", "keep")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
@click.option(
    "--images", is_flag=True, help="Also images that no container uses and that are not pinned."
)
@click.option(
    "--force",
    is_flag=True,
    help="Also addresses of lost pods whose network plugins refuse them, or are gone.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="An array of all things with action, reason and size."
)
@click.pass_context
def gc(context: click.Context, dry_run: bool, images: bool, force: bool, as_json: bool) -> None:
    """Remove what nobody needs from the server's disk, and say of everything else why it is kept.

    Images that are not as [images] store says, and that no container uses, are converted: no
    registry is asked. Pods, containers and, without --images, images are kept in any case. Exit
    code 1 when something could not be removed.
    """
    with Client(context.obj) as client:
        items = client.admin(
            private.CollectGarbage(dry_run, images, force), private.GarbageItems, None
        ).items
    found = sorted(items, key=lambda item: ORDER.index(item.action))
    if as_json:
        click.echo(json.dumps([item.to_fields() for item in found], indent=1))
    else:
        columns = (lambda i: i.action, lambda i: i.kind, lambda i: size(i.size_bytes) if i.size_bytes else "-", lambda i: i.name, lambda i: i.why)  # fmt: skip
        rows = [tuple(column(item) for column in columns) for item in found]
        if rows:
            formats.say(formats.table(("ACTION", "KIND", "SIZE", "NAME", "WHY"), rows))
        gone = [item for item in found if item.action in ("remove", "removed")]
        word = "would go" if dry_run else "went"
        click.echo(
            f"{len(gone)} thing{'' if len(gone) == 1 else 's'} {word}: {size(sum(i.size_bytes for i in gone))}"
        )
    if any(item.action == "failed" for item in found):
        context.exit(1)
