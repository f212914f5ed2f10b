"""`pyrunc-cri timeline`: a pod's calls with their steps as a waterfall in the terminal."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from cri_server.cli import output
from cri_server.cli.client import Client
from cri_server.cli.show import printable
from cri_server.rpc import private
from pyrunc.errors import NotFound

WIDTH = 40


@click.command()
@click.argument("pod", default="", metavar="[POD]")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the last N calls.")
@click.option("--slowest", type=click.IntRange(1), metavar="N", help="The N slowest calls, slowest first.")
@click.option("--json", "as_json", is_flag=True, help="An array of calls.")
@click.pass_obj
def timeline(address: str, pod: str, last: int | None, slowest: int | None, as_json: bool) -> None:
    """Show the calls of a pod's life, each with its steps and plugins; of pods that are gone, too.

    POD is an id, its beginning, NAME or NAMESPACE/NAME; without one the calls of all pods are meant.
    """
    if not pod and not last and not slowest and not as_json:
        last = 20
    request = {"pod": pod, "last": last or 0, "slowest": slowest or 0}
    with Client(address) as client:
        calls = client.admin(private.TIMELINE, request)["calls"]
    if as_json:
        click.echo(json.dumps(calls, indent=1))
        return
    if not calls:
        raise NotFound(f"nothing is remembered of {pod!r}" if pod else "nothing is remembered yet")
    output.say("\n".join(line for call in calls for line in _told(call, calls[0])))


def _told(call: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A call's line, and one for each of its parts, drawn on the call's own scale."""
    at = call["started_at_ns"]
    since_s = (at - first["started_at_ns"]) / 1e9
    when = time.strftime("%H:%M:%S", time.localtime(at // 10**9)) + f".{at // 10**6 % 1000:03d}"
    whose = " ".join(str(call[key]) for key in ("pod", "container", "image") if call.get(key))
    total_ms = float(call.get("duration_ms", 0))
    outcome = str(call.get("outcome") or f"exit code {call.get('exit_code')}")
    error = f": {call['error']}" if call.get("error") else ""
    lines = [
        f"{when} {since_s:+9.3f} s {total_ms:>9.1f} ms  {call['call']} {printable(whose)} {outcome}{printable(error)}"
    ]
    for span in call.get("spans", ()):
        mark = " !" if span.get("failed") else ""
        bar = _bar(span["offset_ms"], span["duration_ms"], total_ms)
        lines.append(f"{'':24} {span['duration_ms']:>9.1f} ms  {bar} {printable(span['name'])}{mark}")
    return lines


def _bar(offset_ms: float, duration_ms: float, total_ms: float) -> str:
    """Where in the call, of `WIDTH` cells: at least one is filled."""
    scale = WIDTH / max(total_ms, 0.001)
    begin = min(WIDTH - 1, int(offset_ms * scale))
    length = max(1, min(WIDTH - begin, round(duration_ms * scale)))
    return "·" * begin + "█" * length + "·" * (WIDTH - begin - length)
