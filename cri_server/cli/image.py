"""`pyrunc-cri image load|pull|list|remove`."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, output
from cri_server.cli.client import Client
from cri_server.cli.output import Column, Listing, Output
from cri_server.cli.show import size
from pyrunc.errors import InvalidArgument, NotFound


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


@click.command()
@click.argument("reference", required=False, metavar="[IMAGE]", shell_complete=completion.images)
@click.option("--digests", is_flag=True, help="With the digests.")
@click.option("--pinned", is_flag=True, help="Only those that are pinned.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=VALUE",
    help="reference=PATTERN, dangling=true|false, before=IMAGE, since=IMAGE.",
)
@output.options()
@click.pass_obj
def images(
    address: str, reference: str | None, digests: bool, pinned: bool, filters: tuple[str, ...], how: Output
) -> None:
    """List the node's images, or those of a name."""
    with Client(address) as client:
        found = list(client.image("ListImages", api.ListImagesRequest()).images)
    for text in filters:
        found = _filtered(found, text)
    if reference is not None:
        found = [i for i in found if _is_named(i, reference)]
    if pinned:
        found = [i for i in found if i.pinned]
    if how.format not in ("table", "wide") or how.quiet or how.template is not None:
        output.say(how.listed(_listing(how), found))
        return
    rows = [
        (
            *row,
            *(
                [" ".join(d.rpartition("@")[2] for d in each.repo_digests)]
                if digests or how.format == "wide"
                else []
            ),
        )
        for each in found
        for row in _rows(each, how)
    ]
    titles = ["IMAGE", "ID", "SIZE", "PINNED", *(["DIGEST"] if digests or how.format == "wide" else [])]
    output.say(output.table(titles if how.headers else None, sorted(rows)))


image.add_command(images, "list")


def _rows(each: api.Image, how: Output) -> list[tuple[str, ...]]:
    """A line for each name."""
    names = each.repo_tags or each.repo_digests or ["<none>"]
    return [(name, how.short(each.id), size(each.size), "yes" if each.pinned else "") for name in names]


def _listing(how: Output) -> Listing[api.Image]:
    return Listing(
        "images",
        (
            Column("IMAGE", lambda i: (list(i.repo_tags) or list(i.repo_digests) or ["<none>"])[0]),
            Column("SIZE", lambda i: size(i.size)),
        ),
        output.plain,
        lambda i: i.id if how.no_trunc or how.quiet else how.short(i.id),
        lambda i: (list(i.repo_tags) or [i.id])[0],
    )


def _is_named(each: api.Image, reference: str) -> bool:
    """Whether an image has this name: with or without its tag, as a pattern, or an id's prefix."""
    names = [*each.repo_tags, *each.repo_digests]
    if each.id.removeprefix("sha256:").startswith(reference.removeprefix("sha256:")):
        return True
    bare = {
        name.partition("@")[0].rpartition(":")[0] if "@" not in name else name.partition("@")[0]
        for name in names
    }
    for name in (*names, *bare):
        tails = [name, name.removeprefix("docker.io/library/"), name.removeprefix("docker.io/")]
        if any(fnmatch.fnmatchcase(tail, reference) for tail in tails):
            return True
    return False


def _filtered(found: list[api.Image], text: str) -> list[api.Image]:
    """As crictl's -f; the list is the newest first. Raises InvalidArgument."""
    key, equals, value = text.partition("=")
    if key == "reference" and equals:
        return [i for i in found if _is_named(i, value)]
    if key == "dangling" and value in ("true", "false"):
        return [i for i in found if (not i.repo_tags) == (value == "true")]
    if key in ("before", "since") and equals:
        places = [n for n, i in enumerate(found) if _is_named(i, value)]
        if not places:
            raise NotFound(f"no such image: {value!r}")
        return found[places[0] + 1 :] if key == "before" else found[: places[0]]
    raise InvalidArgument(
        f"--filter {text}: expected reference=PATTERN, dangling=true|false, before=IMAGE or since=IMAGE"
    )


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
