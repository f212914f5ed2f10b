"""`pyrunc-cri inspect`, `inspectp`, `inspecti`: all that the server says about containers, pods and images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import completion, output
from cri_server.cli.client import Client
from cri_server.cli.output import Output
from pyrunc.errors import NotFound

FORMATS = ("json", "yaml")
Describe = Callable[[Client, str, bool], dict[str, Any]]


def container(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """The status of a container. Raises NotFound, ServerError."""
    request = api.ContainerStatusRequest(container_id=client.container(name).id, verbose=verbose)
    return output.with_info(client.runtime("ContainerStatus", request))


def pod(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """The status of a pod. Raises NotFound, ServerError."""
    request = api.PodSandboxStatusRequest(pod_sandbox_id=client.pod(name).id, verbose=verbose)
    return output.with_info(client.runtime("PodSandboxStatus", request))


def image(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """The status of an image. Raises NotFound, ServerError."""
    request = api.ImageStatusRequest(image=api.ImageSpec(image=name), verbose=verbose)
    response = client.image("ImageStatus", request)
    if not response.HasField("image"):
        raise NotFound(f"no such image: {name!r}")
    return output.with_info(response)


KINDS: dict[str, Describe] = {"container": container, "pod": pod, "image": image}


def anything(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """A container, else a pod, else an image of this name. Raises NotFound, ServerError."""
    for describe in KINDS.values():
        try:
            return describe(client, name, verbose)
        except NotFound:
            continue
    raise NotFound(f"no such container, pod or image: {name!r}")


def show(address: str, names: Sequence[str], describe: Describe, quiet: bool, how: Output) -> None:
    """One object, or a list of several."""
    with Client(address) as client:
        found = [describe(client, name, not quiet) for name in names]
    output.say(how.document(found[0] if len(found) == 1 else found))


quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Without what only this server says (`info`)."
)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=completion.both)
@click.option("--type", "kind", type=click.Choice(list(KINDS)), help="Only one of this kind.")
@quiet_option
@output.options(FORMATS, listing=False)
@click.pass_obj
def inspect(address: str, names: tuple[str, ...], kind: str | None, quiet: bool, how: Output) -> None:
    """Show all about containers, pods or images, whatever has the NAME."""
    show(address, names, KINDS[kind] if kind else anything, quiet, how)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="POD...", shell_complete=completion.pods)
@quiet_option
@output.options(FORMATS, listing=False)
@click.pass_obj
def inspectp(address: str, names: tuple[str, ...], quiet: bool, how: Output) -> None:
    """Show all about pods."""
    show(address, names, pod, quiet, how)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="IMAGE...", shell_complete=completion.images)
@quiet_option
@output.options(FORMATS, listing=False)
@click.pass_obj
def inspecti(address: str, names: tuple[str, ...], quiet: bool, how: Output) -> None:
    """Show all about images."""
    show(address, names, image, quiet, how)
