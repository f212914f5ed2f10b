"""The verbs that change nothing: list, ps, events, features, spec."""

from __future__ import annotations

import os

from pyrunc import jsontext
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import InvalidArgument, NotFound, PeerError, WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine
    from pyrunc.container.state import State

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def list(call: CommandLine, log: CommandLog) -> int:
    """Run `list [--format table|json] [--quiet]`. Without --root, a missing root folder gives an
    empty list; a missing folder that --root names is an error."""
    from pyrunc.container.list import containers

    check_format(call.options["format"], "table", "json")
    try:
        reports, broken = containers(states.root_of(call.globals["root"]))
    except NotFound:
        if call.globals["root"]:
            raise
        reports, broken = [], []
    log.warnings(broken)
    if call.options["quiet"]:
        print("".join(f"{report['id']}\n" for report in reports), end="")
    elif call.options["format"] == "json":
        # `null` for an empty list, as runc prints it: Go's form of a nil slice.
        print(jsontext.dumps(reports or None))
    else:
        columns = ("id", "pid", "status", "bundle", "created", "owner")
        _table(
            [
                [name.upper() for name in columns],
                *([str(row[name]) for name in columns] for row in reports),
            ]
        )
    return 0


def ps(call: CommandLine, log: CommandLog) -> int:
    """Run `ps [--format table|json] ID [ARGUMENTS OF ps]`."""
    check_format(call.options["format"], "table", "json")
    pids = _pids(states.find(states.root_of(call.globals["root"]), call.arguments[0]))
    if call.options["format"] == "json":
        print(jsontext.dumps(pids or None))
        return 0
    lines = _ps([*(call.arguments[1:] or ["-ef"])])
    column = _pid_column(lines[0])
    pid_texts = {str(pid) for pid in pids}
    print(lines[0])
    for line in lines[1:]:
        if line.split()[column] in pid_texts:
            print(line)
    return 0


def _pids(state: State) -> Sequence[int]:
    """Return the pids in the container's cgroup, also after the end of the container's init.
    Without a cgroup, raise WrongState while init runs, and return no pids after its end."""
    group = state.group()
    if group is not None:
        return group.processes()
    if status.alive(state.pid, state.start_time):
        raise WrongState(f"container {state.id} has no cgroup")
    return ()


def _ps(arguments: Sequence[str]) -> Sequence[str]:
    """Return the lines that ps(1) prints; the first is the header. Raises PeerError when ps fails,
    NotFound when ps is not installed."""
    import subprocess

    try:
        done = subprocess.run(["ps", *arguments], check=False, capture_output=True)
    except FileNotFoundError:
        raise NotFound('exec: "ps": executable file not found in $PATH') from None
    if done.returncode:
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        raise PeerError(f"ps: exit status {done.returncode}: {output.strip()}")
    return done.stdout.decode("utf-8", "replace").splitlines() or [""]


def _pid_column(header: str) -> int:
    titles = header.split()
    if "PID" not in titles:
        raise InvalidArgument("couldn't find PID field in ps output")
    return titles.index("PID")


def events(call: CommandLine, log: CommandLog) -> int:
    """Run `events [--stats] [--interval 5s] ID`, which prints a JSON object per line."""
    from pyrunc.container import stats

    interval_s = duration_s(call.options["interval"])
    state = states.find(states.root_of(call.globals["root"]), call.arguments[0])
    if call.options["stats"]:
        print(jsontext.dumps(stats.once(state)))
        return 0
    for event in stats.stream(state, interval_s):
        print(jsontext.dumps(event), flush=True)
    return 0


def duration_s(text: str) -> float:
    """Convert `5s`, `500ms`, `1m` or `1h` to seconds. Raises InvalidArgument, also for zero."""
    for unit in ("ms", "s", "m", "h"):
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * UNITS_S[unit]
    raise InvalidArgument(f"invalid duration {text!r}: use a number with ms, s, m or h")


def features(call: CommandLine, log: CommandLog) -> int:
    """Run `features`, which prints compact JSON. It needs no container and no privileges."""
    from pyrunc.cli import features as table

    print(jsontext.dumps(table.features()))
    return 0


def spec(call: CommandLine, log: CommandLog) -> int:
    """Run `spec [--bundle DIR] [--rootless]`, which writes config.json and never replaces an
    existing one."""
    import json

    from pyrunc.cli.rootless import for_an_ordinary_user
    from pyrunc.spec.default import default

    document: dict[str, Any] = default()
    if call.options["rootless"]:
        document = for_an_ordinary_user(document, os.geteuid(), os.getegid())
    path = os.path.join(call.options["bundle"], call.options["file"] or states.CONFIG)
    try:
        with open(path, "x") as file:
            file.write(json.dumps(document, indent="\t") + "\n")
    except FileExistsError:
        raise InvalidArgument(f"File {path} exists. Remove it first") from None
    return 0


def check_format(value: str, *allowed: str) -> None:
    """Raise InvalidArgument for a --format that is not one of `allowed`."""
    if value not in allowed:
        raise InvalidArgument(f"invalid format option {value!r}: one of {', '.join(allowed)}")


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("   ".join(cells).rstrip())
