"""Finds the parts of config.json that cause each operation of the plan.

For each part of the document, the plan is made again without this part. The part causes the
operations that then disappear. If a smaller part inside it has the same effect, only the smaller
part counts. A value that is required is changed instead of removed. A list item, such as a mount,
counts as one part.
"""

from __future__ import annotations

import copy
import json
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from pyrunc.cli.plan import of_bundle
from pyrunc.container import state as states
from pyrunc.container.bundle import Bundle
from pyrunc.errors import Error
from pyrunc.plan.show import numbered
from pyrunc.spec.check import check
from pyrunc.spec.parse import parse

Path = tuple[str | int, ...]
# Parts that are not entered: their contents make no operations, and there may be thousands.
WHOLE = {("linux", "seccomp"), ("process", "env"), ("process", "args"), ("annotations",)}
NOT_TRIED = {("ociVersion",)}
PARTS_LIMIT = 1000
CAUSES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Cause:
    """The place in config.json that causes a line of the plan."""

    path: str
    line: int


@dataclass(slots=True)
class Row:
    """A line of the plan and the places in config.json that cause it. `causes` is empty for a line
    that is in the plan of every configuration."""

    number: str
    text: str
    causes: list[Cause] = field(default_factory=list)


def causes(bundle: Bundle) -> list[Row]:
    """Return every line of a bundle's plan with its causes. Raises the errors of `of_bundle`, and
    OSError when config.json cannot be read."""
    with open(
        os.path.join(bundle.folder, states.CONFIG), encoding="utf-8", errors="surrogateescape"
    ) as file:
        lines = places(file.read())
    rows = [Row(number, text) for number, text in numbered(of_bundle(bundle))]
    paths_by_text: dict[str, set[Path]] = {row.text: set() for row in rows}
    _leave_out(bundle, (), Counter(row.text for row in rows), paths_by_text, [PARTS_LIMIT])
    for row in rows:
        paths = sorted(_joined(paths_by_text[row.text]), key=lambda path: lines.get(path, 0))
        row.causes = [Cause(dotted(path), lines.get(path, 0)) for path in paths[:CAUSES_SHOWN]]
    return rows


def _leave_out(
    bundle: Bundle,
    path: Path,
    whole: Counter[str],
    causes: dict[str, set[Path]],
    remaining: list[int],
) -> None:
    """For each line of the plan, find the smallest parts of the configuration below `path` that
    cause the line: it disappears without the part. Add the paths of these parts to `causes`.

    - `whole`: how often each line occurs in the unchanged plan
    - `remaining`: a list with one number: how many more parts may be tried
    """
    # A plan for each part: 0.5 s for the default configuration, for a verb that a person types.
    for child in _children(bundle.document, path):
        remaining[0] -= 1
        if remaining[0] < 0 or child in NOT_TRIED:
            continue
        missing = _missing_lines(bundle, child, whole)
        before = {text: set(paths) for text, paths in causes.items()}
        if child not in WHOLE and (missing is None or missing):
            _leave_out(bundle, child, whole, causes, remaining)
        for text in missing or ():
            if causes[text] == before[text]:  # no smaller part explains the line
                causes[text].add(child)


def _children(document: Any, path: Path) -> list[Path]:
    value = document
    for key in path:
        value = value[key]
    keys: Any = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    return [(*path, key) for key in keys]


def _missing_lines(bundle: Bundle, path: Path, whole: Counter[str]) -> list[str] | None:
    """Return the lines of the plan that disappear when the part at `path` is left out. If none
    disappears, or the configuration is then invalid, return the lines that disappear when the part
    has another value. None if no other value is valid.

    `whole`: how often each line occurs in the unchanged plan.
    """
    return _without(bundle, path, whole, change=False) or _without(bundle, path, whole, change=True)


def _without(bundle: Bundle, path: Path, whole: Counter[str], *, change: bool) -> list[str] | None:
    """Plan the bundle without the part at `path` or, with `change`, with another value of that
    part. Return the lines of the unchanged plan that disappear. None when the changed configuration
    is not valid.

    `whole`: how often each line occurs in the unchanged plan.
    """
    document: Any = copy.deepcopy(bundle.document)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if change:
        other = _other(parent[path[-1]])
        if other is None:
            return None
        parent[path[-1]] = other
    else:
        del parent[path[-1]]
    try:
        spec = parse(document)
        check(spec)
        plan = of_bundle(Bundle(bundle.folder, document, spec))
    # Without the part the configuration may be invalid (Error), or may contradict an assumption of
    # the planner that no check has tested yet (AssertionError).
    except (Error, AssertionError):
        return None
    return list(whole - Counter(text for _, text in numbered(plan)))


def _other(value: Any) -> Any:
    """Return another value of the same type for a number, a text or a list of texts. None for other
    types. A boolean gets no other value (None), because leaving it out has the same effect."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return [*value[:-1], value[-1] + "x"]
    return None


def _joined(paths: set[Path]) -> set[Path]:
    """Merge paths, so that a person has fewer to read. A path inside a list item becomes the item's
    path. Two or more members of one object become the object."""
    joined = {_item(path) for path in paths}
    while True:
        parents = Counter(path[:-1] for path in joined if len(path) > 1)
        several = {parent for parent, count in parents.items() if count > 1}
        if not several:
            return joined
        deepest = max(several, key=len)
        joined = {path for path in joined if path[: len(deepest)] != deepest} | {deepest}


def _item(path: Path) -> Path:
    """Return the path of the list item that contains `path`, or `path` if no list does."""
    number = next((i for i, key in enumerate(path) if isinstance(key, int)), len(path))
    return path[: number + 1]


def dotted(path: Path) -> str:
    """Format a path: `mounts[0].options`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def places(text: str) -> dict[Path, int]:
    """Map the path of each part of a JSON text to the line, from 1, on which the part begins.
    Raises ValueError."""
    lines: dict[Path, int] = {}
    ends = [i for i, character in enumerate(text) if character == "\n"]
    for path, at in _positions(text):
        lines[path] = bisect_left(ends, at) + 1
    return lines


def _positions(text: str) -> Iterator[tuple[Path, int]]:
    """Yield the path and the offset of each value in the JSON `text`. For a member of an object,
    the offset is that of its name. Not recursive, because texts may be nested deeply."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    open_parts: list[list[Any]] = []  # [kind, path, number of the next item]
    path: Path = ()
    while True:
        if text[at] in "{[":
            open_parts.append([text[at], path, 0])
            at = _skip(text, at + 1)
            if text[at] in "}]":
                open_parts.pop()
                at = _skip(text, at + 1)
            else:
                path, start, at = _enter(text, at, open_parts[-1])
                yield path, start
                continue
        else:
            _, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
        while open_parts and text[at] in "}]":
            open_parts.pop()
            at = _skip(text, at + 1)
        if not open_parts:
            return
        at = _skip(text, at + 1)  # the comma
        path, start, at = _enter(text, at, open_parts[-1])
        yield path, start


def _enter(text: str, at: int, part: list[Any]) -> tuple[Path, int, int]:
    """Return the path of the next member of an object or list, and two offsets in the JSON `text`.
    The first is where the member begins (in an object, with its name), the second where its value
    begins.

    - `at`: the present offset
    - `part`: `{` or `[`, the path of the object or list, and the member's number
    """
    kind, path, number = part
    if kind == "[":
        part[2] = number + 1
        return (*path, number), at, at
    name, after = scanstring(text, at + 1)
    return (*path, name), at, _skip(text, _skip(text, after) + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\n\r":
        at += 1
    return at
