"""`pyrunc-cri image load|pull|list|remove`."""

from __future__ import annotations

from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.client import Client
from cri_server.cli.show import SHORT, size, table
from pyrunc.errors import NotFound


@click.group()
def image() -> None:
    """Images of the node."""


@image.command()
@click.argument("file", type=click.Path(path_type=Path, readable=False))
@click.option("--name", help="For an archive's only image when it has no name of its own.")
@click.pass_obj
def load(address: str, file: Path, name: str | None) -> None:
    """Import FILE, a docker-archive or an OCI archive."""
    with open(file, "rb"):  # the server may read what its client may not
        pass
    with Client(address) as client:
        for found in client.load_image(str(file.resolve()), name):
            click.echo(f"{found['id']}  {' '.join(found['repo_tags'])}")


@image.command()
@click.argument("reference")
@click.pass_obj
def pull(address: str, reference: str) -> None:
    """Fetch REFERENCE from its registry."""
    with Client(address) as client:
        click.echo(fetch(client, reference))


def fetch(client: Client, reference: str) -> str:
    """Pull; the image's id."""
    request = api.PullImageRequest(image=api.ImageSpec(image=reference))
    return str(client.image("PullImage", request, None).image_ref)


def find(client: Client, reference: str) -> api.Image | None:
    """The local image, None when it is not here."""
    request = api.ImageStatusRequest(image=api.ImageSpec(image=reference))
    response: api.ImageStatusResponse = client.image("ImageStatus", request)
    return response.image if response.HasField("image") else None


@image.command("list")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.pass_obj
def list_(address: str, quiet: bool) -> None:
    """List the node's images."""
    with Client(address) as client:
        found = client.image("ListImages", api.ListImagesRequest()).images
        if quiet:
            for each in found:
                click.echo(each.id)
            return
        rows = [
            (name, each.id.removeprefix("sha256:")[:SHORT], size(each.size), "yes" if each.pinned else "")
            for each in found
            for name in (each.repo_tags or each.repo_digests or ["<none>"])
        ]
        click.echo(table(("IMAGE", "ID", "SIZE", "PINNED"), sorted(rows)))


@image.command()
@click.argument("references", nargs=-1, required=True)
@click.pass_obj
def remove(address: str, references: tuple[str, ...]) -> None:
    """Remove images by name or id."""
    with Client(address) as client:
        for reference in references:
            if find(client, reference) is None:
                raise NotFound(f"no such image: {reference!r}")
            request = api.RemoveImageRequest(image=api.ImageSpec(image=reference))
            client.image("RemoveImage", request)
            click.echo(reference)
