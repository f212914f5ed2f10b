"""`pyrunc-cri info`, `version`, `images-fs`, `runtime-config`, `metricsp` and `metricdescs`: print
the state of the server."""

from __future__ import annotations

from typing import Any

import click

import pyrunc
from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client
from cri_server.cli.output import formats
from cri_server.cli.output.formats import OutputOptions
from cri_server.cli.output.show import size


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Leave out the details of this runtime.")
@formats.options(("json", "yaml"), listing=False)
@click.pass_obj
def info(address: str, quiet: bool, output: OutputOptions) -> None:
    """Show the server's conditions, features and settings."""
    with Client(address) as client:
        response = client.call(api.StatusRequest(verbose=not quiet))
        document = formats.with_info(response)
        inner = document.pop("info", {})
        formats.say(output.document({**document, **inner}))


@click.command()
@formats.options(("table", "json", "yaml"), listing=False)
@click.pass_obj
def version(address: str, output: OutputOptions) -> None:
    """Show the versions of pyrunc-cri and of the server."""
    with Client(address) as client:
        versions = formats.plain(client.call(api.VersionRequest()))
    if output.format == "table":
        rows = [("Client:", f"pyrunc-cri {pyrunc.__version__}")]
        rows += [(f"{key[0].upper()}{key[1:]}:", str(value)) for key, value in versions.items()]
        formats.say(formats.table(None, rows))
    else:
        formats.say(output.document({"clientVersion": pyrunc.__version__, **versions}))


@click.command("images-fs")
@formats.options(("table", "json", "yaml"), listing=False)
@click.pass_obj
def images_fs(address: str, output: OutputOptions) -> None:
    """Show the disk usage of images and of the containers' layers."""
    with Client(address) as client:
        response = client.call(api.ImageFsInfoRequest())
    if output.format != "table":
        formats.say(output.document(formats.plain(response)))
        return
    kinds = (
        ("images", response.image_filesystems),
        ("containers", response.container_filesystems),
    )
    rows = [
        (kind, each.fs_id.mountpoint, size(each.used_bytes.value), str(each.inodes_used.value))
        for kind, file_systems in kinds
        for each in file_systems
    ]
    formats.say(formats.table(("KIND", "PATH", "USED", "INODES"), rows))


def _answer(verb: str, request: Any, text: str) -> click.Command:
    """Return a click command named `verb` with the help `text`. It sends `request` and prints the
    reply."""

    @click.command(verb, help=text)
    @formats.options(("json", "yaml"), listing=False)
    @click.pass_obj
    def show(address: str, output: OutputOptions) -> None:
        with Client(address) as client:
            response = client.call(request)
        formats.say(output.document(formats.plain(response)))

    return show


runtime_config = _answer(
    "runtime-config",
    api.RuntimeConfigRequest(),
    "Show the settings that the server reports to kubelet: the cgroup driver.",
)
metricsp = _answer(
    "metricsp",
    api.ListPodSandboxMetricsRequest(),
    "Show the metrics of pods that kubelet collects.",
)
metricdescs = _answer(
    "metricdescs",
    api.ListMetricDescriptorsRequest(),
    "Show the descriptions of the metrics of pods.",
)
