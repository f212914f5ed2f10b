"""The verbs about the plan of a bundle. `plan` prints the plan, or the difference of two plans.
`why` prints which parts of config.json cause the plan's lines."""

from __future__ import annotations

import os
import sys

from pyrunc import jsontext
from pyrunc.cli.inspect import check_format
from pyrunc.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.cli.log import CommandLog
    from pyrunc.cli.parse import CommandLine
    from pyrunc.container.bundle import Bundle
    from pyrunc.plan.model import Plan

DIFFERENT = 1
COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}


def plan(call: CommandLine, log: CommandLog) -> int:
    """Run `plan [BUNDLE]`, which prints what `create` would do: a line for each operation of the
    new process and for each step of its parent.

    With --json or `--format json`, prints an object with the lists `operations` (of objects with
    `line` and `operation`) and `warnings`.

    `plan --diff BUNDLE OTHER` prints the difference like diff(1) -u.
    """
    from pyrunc.container import bundle as bundles
    from pyrunc.plan.show import numbered, show

    check_format(call.options["format"], "text", "json")
    as_json = call.options["format"] == "json" or call.options["json"]
    if call.options["diff"]:
        return _diff(call.arguments, as_json)
    if len(call.arguments) > 1:
        raise InvalidArgument("a second bundle needs --diff")
    bundle_plan = of_bundle(bundles.load(call.arguments[0] if call.arguments else "."))
    if as_json:
        lines = [{"line": number, "operation": text} for number, text in numbered(bundle_plan)]
        print(jsontext.dumps({"operations": lines, "warnings": [*bundle_plan.warnings]}))
    else:
        print(show(bundle_plan))
    return 0


def of_bundle(bundle: Bundle) -> Plan:
    """Return the plan of the container that `create` would make from the bundle. Raises
    InvalidSpec, KernelError, Unsupported."""
    from pyrunc.compile.container import CreateRequest, preview
    from pyrunc.compile.sources import Directory

    root = bundle.spec.root
    assert root is not None
    request = CreateRequest(
        "ID",
        bundle.folder,
        bundle.spec,
        Directory(root.path),
        start_immediately=False,
        record=lambda process: None,
    )
    return preview(request)


def _diff(folders: Sequence[str], as_json: bool) -> int:
    """Print the difference of two bundles' plans. Returns 1 if the plans differ, else 0.

    Line numbers are not compared, so an operation that is added at the beginning counts as one
    changed line.
    """
    import difflib

    from pyrunc.container import bundle as bundles

    if len(folders) != 2:
        raise InvalidArgument("--diff needs two bundles")
    before, after = (_lines(of_bundle(bundles.load(folder))) for folder in folders)
    changes = [*difflib.unified_diff(before, after, folders[0], folders[1], lineterm="", n=1)]
    if as_json:
        rows = [
            {"change": line[0], "operation": line[1:]} for line in changes[2:] if line[0] in "+-"
        ]
        print(jsontext.dumps({"changes": rows}))
    else:
        for line in changes:
            print(_coloured(line))
    # As diff(1) answers, so that scripts can ask.
    return DIFFERENT if changes else 0


def _lines(plan: Plan) -> list[str]:
    from pyrunc.plan.show import numbered

    return [("parent: " if "." in number else "") + text for number, text in numbered(plan)]


def _coloured(line: str) -> str:
    """Return a line of a diff with terminal colours; unchanged if stdout is no terminal or NO_COLOR
    is set."""
    if line[:1] not in COLOURS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return line
    return f"{COLOURS[line[0]]}{line}\x1b[0m"


def why(call: CommandLine, log: CommandLog) -> int:
    """Run `why [BUNDLE]`, which prints each line of the plan with the places in config.json that
    cause it."""
    from pyrunc.cli.why import causes
    from pyrunc.container import bundle as bundles

    rows_of_plan = causes(bundles.load(call.arguments[0] if call.arguments else "."))
    if call.options["json"]:
        rows = [
            {
                "line": row.number,
                "operation": row.text,
                "causes": [{"path": c.path, "line": c.line} for c in row.causes],
            }
            for row in rows_of_plan
        ]
        print(jsontext.dumps({"operations": rows}))
        return 0
    width = max(len(row.number) + len(row.text) for row in rows_of_plan)
    for row in rows_of_plan:
        places = ", ".join(f"{cause.path} (line {cause.line})" for cause in row.causes)
        padding = " " * (width - len(row.number) - len(row.text))
        print(f"{row.number:>6}  {row.text}{padding}  {places or '-'}")
    return 0
