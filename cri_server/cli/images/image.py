"""`pyrunc-cri images`, and the group `image` with all verbs about images."""

from __future__ import annotations

import fnmatch

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion
from cri_server.cli.connection.client import Client
from cri_server.cli.images import clean, mount, transfer
from cri_server.cli.observe import inspect
from cri_server.cli.output import formats
from cri_server.cli.output.formats import Column, Listing, OutputOptions
from cri_server.cli.output.show import size
from pyrunc.errors import InvalidArgument, NotFound

DANGLING = (("dangling", "true"), ("dangling", "false"))
LISTING: Listing[api.Image] = Listing(
    "images",
    (
        Column("IMAGE", lambda i: (list(i.repo_tags) or list(i.repo_digests) or ["<none>"])[0]),
        Column("SIZE", lambda i: size(i.size)),
    ),
    formats.plain,
    lambda i: i.id,
    lambda i: (list(i.repo_tags) or [i.id])[0],
)


@click.group()
def image() -> None:
    """Manage the images of the node."""


@click.command()
@click.argument("reference", required=False, metavar="[IMAGE]", shell_complete=completion.images)
@click.option("--digests", is_flag=True, help="Show the digests.")
@click.option("--pinned", is_flag=True, help="Only pinned images.")
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=VALUE",
    help="reference=PATTERN, dangling=true|false, before=IMAGE, since=IMAGE.",
)
@formats.options()
@click.pass_obj
def images(
    address: str,
    reference: str | None,
    digests: bool,
    pinned: bool,
    filters: tuple[str, ...],
    output: OutputOptions,
) -> None:
    """List the images of the node, or only those called IMAGE."""
    for text in filters:
        _parse_filter(text)
    with Client(address) as client:
        selected = client.images()
    for text in filters:
        selected = _filtered(selected, text)
    if reference is not None:
        selected = [i for i in selected if _is_named(i, reference)]
    if pinned:
        selected = [i for i in selected if i.pinned]
    if output.format not in ("table", "wide") or output.quiet or output.template is not None:
        formats.say(output.render_list(LISTING, selected))
        return
    with_digests = digests or output.format == "wide"
    titles = ["IMAGE", "ID", "SIZE", "PINNED", *(["DIGEST"] if with_digests else [])]
    rows = [row for each in selected for row in _rows(each, output, with_digests=with_digests)]
    formats.say(formats.table(titles if output.headers else None, sorted(rows)))


def _rows(each: api.Image, output: OutputOptions, *, with_digests: bool) -> list[tuple[str, ...]]:
    """Return the table rows of an image, one for each of its names."""
    names = each.repo_tags or each.repo_digests or ["<none>"]
    facts = [output.short(each.id), size(each.size), "yes" if each.pinned else ""]
    if with_digests:
        facts.append(" ".join(digest.rpartition("@")[2] for digest in each.repo_digests))
    return [(name, *facts) for name in names]


def _is_named(each: api.Image, reference: str) -> bool:
    """Return whether `reference` names the image: a name with or without tag, a pattern of a name,
    or a prefix of the id."""
    names = [*each.repo_tags, *each.repo_digests]
    if (each.id if ":" in reference else each.id.rpartition(":")[2]).startswith(reference):
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


def _parse_filter(text: str) -> tuple[str, str]:
    """Split a filter KEY=VALUE into key and value. Raises InvalidArgument for an unknown key."""
    key, equals, value = text.partition("=")
    if equals and (key in ("reference", "before", "since") or (key, value) in DANGLING):
        return key, value
    raise InvalidArgument(
        f"--filter {text}: expected reference=PATTERN, dangling=true|false, before=IMAGE or"
        " since=IMAGE"
    )


def _filtered(images: list[api.Image], text: str) -> list[api.Image]:
    """Return the images that `text`, a filter in crictl's syntax, selects. `images` must be sorted
    newest first. Raises InvalidArgument for an unknown filter, NotFound if `before=` or `since=`
    names none of `images`."""
    key, value = _parse_filter(text)
    if key == "reference":
        return [i for i in images if _is_named(i, value)]
    if key == "dangling":
        return [i for i in images if (not i.repo_tags) == (value == "true")]
    places = [n for n, i in enumerate(images) if _is_named(i, value)]
    if not places:
        raise NotFound(f"no such image: {value!r}")
    return images[places[0] + 1 :] if key == "before" else images[: places[0]]


for _name, _command in (
    ("list", images),
    ("load", transfer.load),
    ("pull", transfer.pull),
    ("push", transfer.push),
    ("save", transfer.save),
    ("tag", transfer.tag),
    ("mount", mount.mount),
    ("umount", mount.umount),
    ("remove", clean.rmi),
    ("prune", clean.image_prune),
    ("ls", images),
    ("rm", clean.rmi),
    ("inspect", inspect.inspecti),
    ("history", clean.history),
):
    image.add_command(_command, _name)
