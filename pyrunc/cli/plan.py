"""Verbs about the plan of a bundle: `plan`, the difference of two, and `why`: where its lines come
from."""

from __future__ import annotations

import sys

from pyrunc import jsontext
from pyrunc.errors import InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyrunc.cli.log import Log
    from pyrunc.cli.parse import Call
    from pyrunc.container.bundle import Bundle
    from pyrunc.plan.model import Plan

DIFFERENT = 1
COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}


def plan(call: Call, log: Log) -> int:
    """`plan [BUNDLE]`: what `create` would do in it, one line per operation; as JSON, a list of
    these lines.

    `plan --diff BUNDLE OTHER`: what is different, as diff(1) -u writes it.
    """
    from pyrunc.container import bundle as bundles
    from pyrunc.plan.show import numbered, show

    if call.options["format"] not in ("text", "json"):
        raise InvalidArgument(
            f"invalid format option {call.options['format']!r}: one of text, json"
        )
    if call.options["diff"]:
        return _diff(call.arguments, call.options["format"] == "json" or call.options["json"])
    if len(call.arguments) > 1:
        raise InvalidArgument("a second bundle is for --diff")
    found = of_bundle(bundles.load(call.arguments[0] if call.arguments else "."))
    if call.options["format"] == "json" or call.options["json"]:
        lines = [{"line": number, "operation": text} for number, text in numbered(found)]
        print(jsontext.dumps({"operations": lines, "warnings": [*found.warnings]}))
    else:
        print(show(found))
    return 0


def of_bundle(bundle: Bundle) -> Plan:
    """The plan of a bundle. Raises what `preview` raises."""
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
    """Lines are compared without their numbers: one more at the beginning is one line of
    difference."""
    import difflib

    from pyrunc.container import bundle as bundles

    if len(folders) != 2:
        raise InvalidArgument("--diff needs two bundles")
    before, after = (_lines(of_bundle(bundles.load(folder))) for folder in folders)
    found = [*difflib.unified_diff(before, after, folders[0], folders[1], lineterm="", n=1)]
    if as_json:
        rows = [{"change": line[0], "operation": line[1:]} for line in found[2:] if line[0] in "+-"]
        print(jsontext.dumps({"changes": rows}))
    else:
        for line in found:
            print(_coloured(line))
    return DIFFERENT if found else 0


def _lines(plan: Plan) -> list[str]:
    from pyrunc.plan.show import numbered

    return [("parent: " if "." in number else "") + text for number, text in numbered(plan)]


def _coloured(line: str) -> str:
    """On a terminal, unless NO_COLOR says no."""
    import os

    if line[:1] not in COLOURS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return line
    return f"{COLOURS[line[0]]}{line}\x1b[0m"


def why(call: Call, log: Log) -> int:
    """`why [BUNDLE]`: each line of the plan with the places in config.json that it comes from."""
    from pyrunc.cli.why import causes
    from pyrunc.container import bundle as bundles

    found = causes(bundles.load(call.arguments[0] if call.arguments else "."))
    if call.options["json"]:
        rows = [
            {
                "line": row.number,
                "operation": row.text,
                "causes": [{"path": c.path, "line": c.line} for c in row.causes],
            }
            for row in found
        ]
        print(jsontext.dumps({"operations": rows}))
        return 0
    width = max(len(row.number) + len(row.text) for row in found)
    for row in found:
        places = ", ".join(f"{cause.path} (line {cause.line})" for cause in row.causes)
        print(
            f"{row.number:>6}  {row.text}{' ' * (width - len(row.number) - len(row.text))}  {places or '-'}"
        )
    return 0
