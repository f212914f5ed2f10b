"""`pyrunc-cri events`: what happens to containers and pods, as it happens."""

from __future__ import annotations

import datetime
import sys

import click

from cri_server.api import api_pb2 as api
from cri_server.cli import output
from cri_server.cli.client import Client
from cri_server.cli.output import Output
from cri_server.cli.selection import Selection, selector
from cri_server.cli.show import SHORT, printable


@click.command()
@click.option("--pod", default="", metavar="POD", help="Only of this pod (id, prefix or name).")
@click.option(
    "--label",
    "--selector",
    "labels",
    multiple=True,
    metavar="SELECTOR",
    help="Only of pods with these labels.",
)
@output.options(("table", "json"), listing=False)
@click.pass_obj
def events(address: str, pod: str, labels: tuple[str, ...], how: Output) -> None:
    """Follow what happens to containers and pods until interrupted; each line of -o json is an object."""
    selection = Selection(pod=pod)
    tests = [selector(text) for text in labels]
    with Client(address) as client:
        for event in client.stream("GetContainerEvents", api.GetEventsRequest()):
            status = event.pod_sandbox_status
            if (pod and not selection.in_pod(status)) or not all(test(status.labels) for test in tests):
                continue
            output.say(_line(event, how))
            sys.stdout.flush()


def _line(event: api.ContainerEventResponse, how: Output) -> str:
    if how.template is not None:
        return how.document(output.plain(event))
    if how.format == "json":
        return output.as_json(output.plain(event))
    when = datetime.datetime.fromtimestamp(event.created_at / 1e9).astimezone()
    shown = when.isoformat(timespec="milliseconds")
    kind = api.ContainerEventType.Name(event.container_event_type).split("_")[1].lower()
    names = {c.id: c.metadata.name for c in event.containers_statuses}
    pod = event.pod_sandbox_status.metadata
    what = "pod" if event.container_id == event.pod_sandbox_status.id else "container"
    name = f"{pod.namespace}/{pod.name}"
    if what == "container":
        name += f"/{names.get(event.container_id, '?')}"
    return printable(f"{shown}  {kind:<8} {what:<9} {name}  {event.container_id[:SHORT]}")
