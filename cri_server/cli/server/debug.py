"""`pyrunc-cri debug`: prints stacks and a profile of the running server."""

from __future__ import annotations

from collections import Counter

import click

from cri_server.cli.connection.client import Client
from cri_server.observability.debug import PROFILE_LIMIT_S
from cri_server.rpc import private
from pyrunc.errors import VISIBLE

ANSWER_S = 30.0
LISTED_FUNCTIONS = 25


@click.group()
def debug() -> None:
    """Print what the running server does."""


@debug.command()
@click.pass_obj
def stacks(address: str) -> None:
    """Print the stacks of the server's threads and tasks. If the server does not answer, kill -USR1
    PID writes the threads' stacks to its log."""
    with Client(address) as client:
        click.echo(client.admin(private.DebugStacks(), private.StackText, ANSWER_S).text)


@debug.command()
@click.argument("seconds", type=click.FloatRange(0, PROFILE_LIMIT_S, min_open=True))
@click.option(
    "--folded", is_flag=True, help="Print stacks with counts, for flame graphs and speedscope."
)
@click.pass_obj
def profile(address: str, seconds: float, folded: bool) -> None:
    """Sample the server's threads every 5 ms for SECONDS, and print where the time goes."""
    with Client(address) as client:
        stacks = list(
            client.admin(private.DebugProfile(seconds), private.Stacks, seconds + ANSWER_S).stacks
        )
    if folded:
        click.echo("\n".join(line.translate(VISIBLE) for line in stacks))
        return
    click.echo(_table(stacks))


def _table(stacks: list[str]) -> str:
    """Return a table of the event loop's functions, the busiest first. Its columns:

    - the share of samples in the function itself;
    - the share of samples in the function or in functions that it called;
    - the function's name.
    """
    samples = 0
    total, own = Counter[str](), Counter[str]()
    for line in stacks:
        stack, _, number = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if thread != "MainThread" or not frames:
            continue
        samples += int(number)
        for name in set(frames):
            total[name] += int(number)
        own[frames[-1]] += int(number)
    rows = [f"{'itself':>8} {'with calls':>10}  function ({samples} samples)"]
    names = sorted(total, key=lambda each: (-own[each], -total[each]))
    for name in names[:LISTED_FUNCTIONS]:
        rows.append(f"{own[name] / samples:>8.1%} {total[name] / samples:>10.1%}  {name}")
    return "\n".join(rows).translate(VISIBLE | {10: "\n"})
