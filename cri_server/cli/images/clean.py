"""`pyrunc-cri rmi`, `prune` and `history`: remove images, remove unused objects, and show an
image's build steps."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import completion, options, ownership
from cri_server.cli.connection.client import Client, pod_names
from cri_server.cli.containers.stop import remove_pod
from cri_server.cli.output import formats
from cri_server.cli.output.formats import Column, Listing, OutputOptions
from cri_server.cli.output.report import for_each
from cri_server.cli.output.show import age, size


def title(image: api.Image) -> str:
    """Return an image's first tag, else its first digest, else its id."""
    return (list(image.repo_tags) or list(image.repo_digests) or [image.id])[0]


def unused(client: Client, gone: Collection[str] = ()) -> list[api.Image]:
    """Return the images that are not pinned and that no container uses. Containers whose ids are in
    `gone` do not count."""
    used = set()
    for container in client.containers():
        if container.id not in gone:
            used |= {container.image_id, container.image_ref, container.image.image}
    return [
        i
        for i in client.images()
        if not i.pinned and not used & {i.id, *i.repo_tags, *i.repo_digests}
    ]


def remove(client: Client, reference: str) -> None:
    """Remove an image. Raises ServerError if a container uses it."""
    client.call(api.RemoveImageRequest(image=api.ImageSpec(image=reference)))


@click.command()
@options.names("IMAGE...", completion.images, required=False)
@click.option("-a", "--all", "all_images", is_flag=True, help="All images.")
@click.option("-p", "--prune", is_flag=True, help="All images that no container uses.")
@click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def rmi(address: str, names: tuple[str, ...], all_images: bool, prune: bool, force: bool) -> None:
    """Remove images by name or id. An image that a container uses is not removed."""
    if [bool(names), all_images, prune].count(True) != 1:
        raise click.UsageError("needs either names of images, or --all or --prune")
    with Client(address) as client:

        def act(reference: str) -> None:
            client.require_image(reference)
            remove(client, reference)
            click.echo(reference)

        if names:
            for_each(names, act)
            return
        selected = unused(client) if prune else [i for i in client.images() if not i.pinned]
        if ownership.confirm("remove", [title(i) for i in selected], force=force):
            for_each([i.id for i in selected], act)


@click.command(short_help="Remove pods and containers that have ended, and unused images")
@click.option("-a", "--all", "with_names", is_flag=True, help="Also images that have a name.")
@click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation.")
@click.option("--images", "only_images", is_flag=True, help="Only images.")
@click.pass_obj
def prune(address: str, with_names: bool, force: bool, only_images: bool) -> None:
    """Remove pods and containers that have ended, and unused images without a name. Pods of kubelet
    are not removed."""
    _prune(address, with_names, force, only_images)


@click.command("prune")
@click.option("-a", "--all", "with_names", is_flag=True, help="Also images that have a name.")
@click.option("-f", "--force", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def image_prune(address: str, with_names: bool, force: bool) -> None:
    """Remove images that have no name and that no container uses."""
    _prune(address, with_names, force, only_images=True)


def _prune(address: str, with_names: bool, force: bool, only_images: bool) -> None:
    with Client(address) as client:
        pods, containers = ([], []) if only_images else _ended(client)
        # Images of containers that are removed below count as unused.
        gone = {c.id for c in containers} | {
            c.id for p in pods for c in client.containers(pod_sandbox_id=p.id)
        }
        images = [i for i in unused(client, gone) if with_names or not i.repo_tags]
        descriptions = [f"pod {pod_names(p)[1]}" for p in pods]
        descriptions += [f"container {c.metadata.name}" for c in containers]
        descriptions += [f"image {title(i)}" for i in images]
        if not ownership.confirm("remove", descriptions, force=force):
            return
        for pod in pods:
            remove_pod(client, pod.id, 0)
        for container in containers:
            client.remove_container(container.id)
        for image in images:
            remove(client, image.id)
        for line in descriptions:
            click.echo(line)
        click.echo(f"freed {size(sum(i.size for i in images))} of images")


def _ended(client: Client) -> tuple[list[api.PodSandbox], list[api.Container]]:
    """Return the pods that are not ready, and the exited containers in ready pods. Leaves out
    kubelet's pods and their containers."""
    own = [p for p in client.pods() if ownership.owner(p.labels) != "kubelet"]
    pods = [p for p in own if p.state == api.SANDBOX_NOTREADY]
    ready = {p.id for p in own} - {p.id for p in pods}
    exited = [
        c
        for c in client.containers()
        if c.state == api.CONTAINER_EXITED and c.pod_sandbox_id in ready
    ]
    return pods, exited


@click.command()
@click.argument("image", shell_complete=completion.images)
@formats.options()
@click.pass_obj
def history(address: str, image: str, output: OutputOptions) -> None:
    """Show the build steps of IMAGE, the newest first. Needs a server that reports the image's
    configuration."""
    with Client(address) as client:
        info = client.image_info(image)
    steps = list((info.get("imageSpec") or {}).get("history") or [])
    sizes = [layer.get("size") for layer in info.get("layers") or []]
    for step in steps:
        step["size"] = 0 if step.get("empty_layer") else sizes.pop(0) if sizes else None
    listing: Listing[dict[str, Any]] = Listing(
        "history",
        (
            Column("CREATED", lambda s: _age(s.get("created"))),
            Column("CREATED BY", lambda s: _cut(str(s.get("created_by", "")), output)),
            Column("SIZE", lambda s: "-" if s["size"] is None else size(s["size"])),
            Column("COMMENT", lambda s: str(s.get("comment", ""))),
        ),
        dict,
        lambda s: str(s.get("created_by", "")),
        lambda s: str(s.get("created_by", "")),
    )
    formats.say(output.render_list(listing, steps[::-1]))


def _age(text: Any) -> str:
    try:
        moment = datetime.datetime.fromisoformat(str(text)[:19] + "+00:00")
    except ValueError:
        return "-"
    return age(int(moment.timestamp() * 1e9))


def _cut(text: str, output: OutputOptions) -> str:
    return text if output.no_trunc or len(text) <= 60 else f"{text[:59]}…"
