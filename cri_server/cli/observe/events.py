"""`pyrunc-cri events`: prints events of containers and pods."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click

from cri_server.api import api_pb2 as api
from cri_server.cli.arguments import options
from cri_server.cli.arguments.selection import Selection, selector
from cri_server.cli.connection.client import Client
from cri_server.cli.observe import past_events
from cri_server.cli.output import formats
from cri_server.cli.output.formats import OutputOptions
from cri_server.cli.output.show import SHORT, printable
from cri_server.cli.streams.log_lines import moment
from cri_server.rpc import private
from pyrunc.errors import InvalidArgument


@click.command()
@click.option("--pod", default="", metavar="POD", help="Only this pod (id, prefix or name).")
@options.labels("Only pods with these labels.")
@click.option(
    "--since",
    metavar="TIME",
    help="Also past events since then: 42m, or 2026-11-22T10:00:00Z; they have no labels.",
)
@click.option(
    "--until", metavar="TIME", help="With --since: print only events before then, and exit."
)
@formats.options(("table", "json"), listing=False)
@click.pass_obj
def events(
    address: str,
    pod: str,
    labels: tuple[str, ...],
    since: str | None,
    until: str | None,
    output: OutputOptions,
) -> None:
    """Print events of containers and pods as they happen, until interrupted. With --until, print
    only past events. With -o json, each line is an object."""
    selection = Selection(pod=pod)
    tests = [selector(text) for text in labels]
    begin_ns, end_ns = _times(since, until, labels)
    with Client(address) as client:
        if begin_ns is None:
            stream = client.stream(api.GetEventsRequest())
        else:
            stream = _since(client, pod, begin_ns, end_ns)
        for event in stream:
            status = event.pod_sandbox_status
            if (pod and not selection.in_pod(status)) or not all(
                test(status.labels) for test in tests
            ):
                continue
            formats.say(_line(event, output))
            sys.stdout.flush()


def _times(
    since: str | None, until: str | None, labels: tuple[str, ...]
) -> tuple[int | None, int | None]:
    """Parse --since and --until to nanoseconds since 1970; None for an option that is not set.
    Raises InvalidArgument for an invalid time, for --until without --since, and for `labels` (the
    values of --label) with --since."""
    if since is None:
        if until is not None:
            raise InvalidArgument("--until needs --since: without it only new events are printed")
        return None, None
    if labels:
        raise InvalidArgument("--since excludes --label: past events have no labels")
    now = datetime.datetime.now(datetime.UTC)
    begin, end = (moment(text, now) if text else None for text in (since, until))
    if end is not None and end > now:
        raise InvalidArgument(f"--until {until} is in the future")
    return _nanoseconds(begin), _nanoseconds(end)


def _nanoseconds(when: datetime.datetime | None) -> int | None:
    return None if when is None else int(when.timestamp() * 1e9)


def _since(client: Client, pod: str, begin_ns: int, end_ns: int | None) -> Iterator[Any]:
    """Yield the events from `begin_ns` to `end_ns` (nanoseconds since 1970), from the server's
    timeline. If `end_ns` is None, new events follow as they happen."""
    if end_ns is None:
        entries: Iterable[Any] = client.admin_stream(private.FollowTimeline(pod), private.decode)
    else:
        calls = client.admin(private.Timeline(pod), private.Calls).calls
        entries = sorted(calls, key=lambda each: int(each.get("ended_at_ns", 0)))
    for event in past_events.events(entries):
        if event.created_at >= begin_ns and (end_ns is None or event.created_at <= end_ns):
            yield event


def _line(event: api.ContainerEventResponse, output: OutputOptions) -> str:
    if output.template is not None:
        return output.document(formats.plain(event))
    if output.format == "json":
        return formats.as_json(formats.plain(event))
    when = datetime.datetime.fromtimestamp(event.created_at / 1e9).astimezone()
    time = when.isoformat(timespec="milliseconds")
    kind = api.ContainerEventType.Name(event.container_event_type).split("_")[1].lower()
    names = {c.id: c.metadata.name for c in event.containers_statuses}
    pod = event.pod_sandbox_status.metadata
    subject = "pod" if event.container_id == event.pod_sandbox_status.id else "container"
    name = f"{pod.namespace}/{pod.name}"
    if subject == "container":
        name += f"/{names.get(event.container_id, '?')}"
    return printable(f"{time}  {kind:<8} {subject:<9} {name}  {event.container_id[:SHORT]}")
