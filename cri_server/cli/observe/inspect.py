"""`pyrunc-cri inspect`, `inspectp`, `inspecti`: print the full status of containers, pods and
images."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import click

from cri_server.cli.arguments import completion, options
from cri_server.cli.connection.client import Client
from cri_server.cli.output import formats
from cri_server.cli.output.formats import OutputOptions
from pyrunc.errors import NotFound

FORMATS = ("json", "yaml")
TIMES = ("createdAt", "startedAt", "finishedAt")
Describe = Callable[[Client, str, bool], dict[str, Any]]


def container(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """Return the status of a container as crictl prints it. Raises NotFound, ServerError."""
    response = client.container_status(client.container(name).id, verbose=verbose)
    return _as_crictl(formats.with_info(response))


def pod(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """Return the status of a pod as crictl prints it. Raises NotFound, ServerError."""
    response = client.pod_status(client.pod(name).id, verbose=verbose)
    return _as_crictl(formats.with_info(response))


def image(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """Return the status of an image as crictl prints it. Raises NotFound, ServerError."""
    document = formats.with_info(client.require_image(name, verbose=verbose))
    return {"status": document.pop("image"), **document}


def _as_crictl(document: dict[str, Any]) -> dict[str, Any]:
    """Convert the times and the stop signal in a status to crictl's texts, in place, and return the
    status."""
    status = document["status"]
    for key in TIMES:
        if key in status:
            status[key] = moment(int(status[key]))
    # Only our interface file puts this prefix before CRI's signal names; a message has the number.
    if "stopSignal" in status:
        status["stopSignal"] = status["stopSignal"].removeprefix("SIGNAL_")
    return document


def moment(nanoseconds: int) -> str:
    """Format nanoseconds since 1970 as RFC 3339 in this machine's time zone. 0 becomes Go's zero
    time."""
    if nanoseconds <= 0:
        return "0001-01-01T00:00:00Z"
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    whole = datetime.datetime.fromtimestamp(seconds, datetime.UTC).astimezone()
    digits = f"{fraction:09}".rstrip("0")
    zone = whole.strftime("%z")
    suffix = "Z" if zone == "+0000" else f"{zone[:3]}:{zone[3:]}"
    return f"{whole:%Y-%m-%dT%H:%M:%S}{'.' if digits else ''}{digits}{suffix}"


KINDS: dict[str, Describe] = {"container": container, "pod": pod, "image": image}


def any_object(client: Client, name: str, verbose: bool) -> dict[str, Any]:
    """Return the status of the container, pod or image with this name or id. If there is none,
    `name` may be a prefix of an id. Raises NotFound, ServerError."""
    for prefix in (False, True):
        for find, describe in ((client.container, container), (client.pod, pod)):
            with contextlib.suppress(NotFound):
                return describe(client, find(name, prefix=prefix).id, verbose)
        with contextlib.suppress(NotFound):
            return image(client, name, verbose)
    raise NotFound(f"no such container, pod or image: {name!r}")


def show(
    address: str, names: Sequence[str], describe: Describe, quiet: bool, output: OutputOptions
) -> None:
    """Print the status of the objects `names`: a list, or a single object for a single name.

    `describe`: returns the status of one object; `quiet`: leave out `info`."""
    with Client(address) as client:
        documents = [describe(client, name, not quiet) for name in names]
    formats.say(output.document(documents[0] if len(documents) == 1 else documents))


quiet_option = click.option(
    "-q", "--quiet", is_flag=True, help="Leave out `info`, the details of this runtime."
)


@click.command(short_help="Show the status of containers, pods or images")
@options.names("NAME...", completion.both)
@click.option("--type", "kind", type=click.Choice(list(KINDS)), help="The kind of NAME.")
@click.option("--origins", is_flag=True, help="Show where each value of a container comes from.")
@quiet_option
@formats.options(FORMATS, listing=False, short=True)
@click.pass_obj
def inspect(
    address: str,
    names: tuple[str, ...],
    kind: str | None,
    origins: bool,
    quiet: bool,
    output: OutputOptions,
) -> None:
    """Show the full status of the containers, pods or images with these names."""
    if origins:
        _show_origins(address, names)
        return
    show(address, names, KINDS[kind] if kind else any_object, quiet, output)


def _show_origins(address: str, names: Sequence[str]) -> None:
    from cri_server.cli.observe.origins import origins

    with Client(address) as client:
        for name in names:
            identifier = client.container(name).id
            status = container(client, identifier, True)
            image_status = image(
                client, status["status"]["imageId"] or status["status"]["imageRef"], True
            )
            config, pod_config = client.container_config(identifier)
            of_image = (image_status["info"].get("imageSpec") or {}).get("config") or {}
            rows = origins(config, pod_config, of_image, status["info"].get("runtimeSpec") or {})
            formats.say(formats.table(("VALUE OF", "VALUE", "FROM"), rows))


def _inspect_command(verb: str, kind: str, complete: Any) -> click.Command:
    @click.command(verb, help=f"Show the full status of {kind}s.")
    @options.names(f"{kind.upper()}...", complete)
    @quiet_option
    @formats.options(FORMATS, listing=False, short=True)
    @click.pass_obj
    def inspect(address: str, names: tuple[str, ...], quiet: bool, output: OutputOptions) -> None:
        show(address, names, KINDS[kind], quiet, output)

    return inspect


inspectp = _inspect_command("inspectp", "pod", completion.pods)
inspecti = _inspect_command("inspecti", "image", completion.images)
