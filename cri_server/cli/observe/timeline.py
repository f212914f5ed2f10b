"""`pyrunc-cri timeline`: shows the calls for a pod with their steps as a waterfall, in the terminal
or as an HTML page."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cri_server.cli.connection.client import Client, ServerError, UnsupportedCall
from cri_server.cli.observe.waterfall import TimelineCall, lines
from cri_server.cli.output import formats
from cri_server.cli.output.report import report
from cri_server.rpc import private
from pyrunc import atomic_file
from pyrunc.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from cri_server.observability.timeline.ring import Entry

RETRY_S = 1.0
DEFAULT_CALLS = 20


@click.command()
@click.argument("pod", default="", metavar="[POD]")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N calls.")
@click.option(
    "--slowest", type=click.IntRange(1), metavar="N", help="The N slowest calls, slowest first."
)
@click.option(
    "-f", "--follow", is_flag=True, help="Continue with each call that ends, until interrupted."
)
@click.option(
    "--json", "as_json", is_flag=True, help="An array of calls; with --follow one object per line."
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write an HTML page; - is stdout.",
)
@click.pass_obj
def timeline(
    address: str,
    pod: str,
    last: int | None,
    slowest: int | None,
    follow: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Show the calls for a pod, each with its steps, also after the pod is gone.

    POD is an id or a prefix of it, NAME or NAMESPACE/NAME; by default the calls for all pods are
    shown.
    """
    if follow and (slowest or html):
        raise InvalidArgument(
            f"--follow and --{'slowest' if slowest else 'html'} exclude each other"
        )
    if as_json and html:
        raise InvalidArgument("--json and --html exclude each other")
    if not pod and not last and not slowest and (follow or not (as_json or html)):
        last = DEFAULT_CALLS
    request = private.Timeline(pod, last or 0, slowest or 0)
    with Client(address) as client:
        calls = list(client.admin(request, private.Calls).calls)
    if follow:
        _follow(address, pod, calls, as_json=as_json)
    elif html:
        _write_page(html, pod, calls)
    elif as_json:
        click.echo(json.dumps(calls, indent=1))
    else:
        _check(calls, pod)
        first_ns, width = calls[0]["started_at_ns"], _width()
        formats.say(
            "\n".join(
                line
                for call in calls
                for line in lines(TimelineCall.of_entry(call), first_ns, width)
            )
        )


def _width() -> int:
    """Return the terminal's width in columns; 0 if stdout is no terminal, so that names are not
    shortened."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _check(calls: list[Entry], pod: str) -> None:
    if not calls:
        raise NotFound(f"the timeline has no calls for {pod!r}" if pod else "the timeline is empty")


def _write_page(path: Path, pod: str, calls: list[Entry]) -> None:
    from cri_server.cli.observe.waterfall_page import page

    _check(calls, pod)
    text = page(pod, [TimelineCall.of_entry(call) for call in calls])
    if str(path) == "-":
        click.echo(text, nl=False)
    else:
        # A browser may reload the page at any moment, so it must never be incomplete.
        atomic_file.write_bytes(str(path.absolute()), text.encode(), mode=0o644)


def _follow(address: str, pod: str, calls: list[Entry], *, as_json: bool) -> None:
    first_ns = calls[0]["started_at_ns"] if calls else time.time_ns()
    after_ns = max((call.get("ended_at_ns", 0) for call in calls), default=0)
    for call in itertools.chain(calls, _ending(address, pod, after_ns)):
        text = (
            json.dumps(call)
            if as_json
            else "\n".join(lines(TimelineCall.of_entry(call), first_ns, _width()))
        )
        formats.say(text)
        sys.stdout.flush()


def _ending(address: str, pod: str, after_ns: int) -> Iterator[Entry]:
    """Yield the timeline entries of calls as they end, from `after_ns` on. Reconnects after a
    restart of the server and then also yields the calls that ended meanwhile."""
    reported = False
    while True:
        try:
            with Client(address) as client:
                for call in client.admin_stream(
                    private.FollowTimeline(pod, after_ns), private.decode
                ):
                    after_ns, reported = max(after_ns, call["ended_at_ns"]), False
                    yield call
        except UnsupportedCall:
            raise
        except ServerError as error:
            if not reported:
                report(f"{error}; waiting for the server")
            reported = True
        time.sleep(RETRY_S)
