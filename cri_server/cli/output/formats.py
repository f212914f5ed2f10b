"""The output formats of all verbs: `-o table|wide|json|yaml|name`, templates, `-q`, and colours on
terminals.

JSON is the CRI message in protobuf's JSON mapping (camelCase, 64-bit numbers as strings, empty
fields included), so that scripts written for crictl can read it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from cri_server.cli.output.show import SHORT, printable
from pyrunc.errors import VISIBLE, InvalidArgument

if TYPE_CHECKING:
    from cri_server.cli.output.template import Template

Item = TypeVar("Item")
FORMATS = ("table", "wide", "json", "yaml", "name")
TEMPLATES = ("go-template=", "template=", "table ")
WATCH_S = 2.0
CLEAR = "\x1b[H\x1b[2J\x1b[3J"  # cursor home, clear the screen, clear its history
COLOURS = {
    "running": "green",
    "ready": "green",
    "created": "yellow",
    "paused": "yellow",
    "not ready": "yellow",
    "unknown": "red",
    "exited": "bright_black",
}


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """A column of a table. `of` returns an item's cell. `wide`: whether only the format `wide`
    shows the column."""

    title: str
    of: Callable[[Item], str]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """Describes how a verb lists objects, such as pods or images.

    `key`: the key of the list in JSON; `columns`: the table's columns; `document`, `identity` and
    `name`: functions that return an item's JSON, id and name."""

    key: str
    columns: Sequence[Column[Item]]
    document: Callable[[Item], dict[str, Any]]
    identity: Callable[[Item], str]
    name: Callable[[Item], str]


JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(127, 160)}
VISIBLE_IN_LINES = {code: text for code, text in VISIBLE.items() if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The options -o, --template, -q, --no-trunc and --no-headers of a command line."""

    format: str = "table"
    template: Template | None = None
    quiet: bool = False
    no_trunc: bool = False
    headers: bool = True

    def short(self, identifier: str) -> str:
        """Return the id without `sha256:`, shortened to SHORT characters unless --no-trunc is
        set."""
        identifier = identifier.rpartition(":")[2]
        return identifier if self.no_trunc else identifier[:SHORT]

    def render_list(self, listing: Listing[Item], items: Sequence[Item]) -> str:
        """Return the items as text in the chosen format, without a final newline. Raises
        InvalidArgument if a template fails on an item, for example because of an unknown field."""
        if self.quiet:
            return "\n".join(map(listing.identity, items))
        if self.template is not None:
            return "\n".join(self._apply_template(self._view(listing, item)) for item in items)
        if self.format == "name":
            return "\n".join(map(listing.name, items))
        if self.format in ("json", "yaml"):
            return self.document({listing.key: [listing.document(item) for item in items]})
        columns = [c for c in listing.columns if self.format == "wide" or not c.wide]
        rows = [[c.of(item) for c in columns] for item in items]
        return table([c.title for c in columns] if self.headers else None, rows)

    def _view(self, listing: Listing[Item], item: Item) -> dict[str, Any]:
        """Return the object for a template: the fields of an item's JSON, and the cells of the
        item's table row under their column titles (`{{.POD}}`)."""
        cells = {c.title.replace(" ", ""): c.of(item) for c in listing.columns}
        document = listing.document(item)
        return {
            **document,
            **{title: cell for title, cell in cells.items() if title not in document},
        }

    def document(self, value: Any) -> str:
        """Return an object as text in the chosen format: from the template, as YAML, or as JSON."""
        if self.template is not None:
            return self._apply_template(value)
        if self.format == "yaml":
            import yaml  # takes 18 ms, and only this format needs it

            return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n")
        return as_json(value, indent=2)

    def _apply_template(self, value: Any) -> str:
        """Return the text of the template for `value`. If stdout is a terminal, escapes control
        characters, because they may come from an image or a container."""
        assert self.template is not None
        text = self.template.render(value)
        return text.translate(VISIBLE_IN_LINES) if sys.stdout.isatty() else text


def as_json(value: Any, indent: int | None = None) -> str:
    """Encode as JSON. Escapes all control characters, also U+0080 to U+009F, because terminals
    treat U+009B as ESC [."""
    return json.dumps(value, indent=indent, ensure_ascii=False).translate(JSON_CONTROLS)


def plain(message: Any) -> dict[str, Any]:
    """Convert a protobuf message to a dictionary in protobuf's JSON mapping, including empty
    fields."""
    from google.protobuf.json_format import MessageToDict  # not for tables

    document: dict[str, Any] = MessageToDict(message, always_print_fields_with_no_presence=True)
    return document


def with_info(message: Any) -> dict[str, Any]:
    """Convert a verbose status reply to a dictionary. JSON texts in its map `info` become objects,
    as in crictl."""
    document = plain(message)
    info = document.pop("info", {})
    if not info:
        return document
    for key, text in info.items():
        with contextlib.suppress(ValueError):
            info[key] = json.loads(text)
    nested = info.pop("info", None)
    return {
        **document,
        "info": {**info, **nested} if isinstance(nested, Mapping) else nested or info,
    }


# -- options


def options(
    formats: Sequence[str] = FORMATS, *, listing: bool = True, short: bool = False
) -> Callable[[Any], Any]:
    """Return a click decorator for the output options; a verb's function gets them all as `output`.

    `formats`: the values of -o, the default first; `listing`: also add -q, --no-trunc and
    --no-headers; `short`: also add -f for --format, as in docker's inspect."""
    formats_text = "|".join((*formats, "go-template=TEMPLATE"))
    own = [
        click.option(
            *("-o", "--output"), default=formats[0], metavar=formats_text, help="Output format."
        ),
        click.option(
            *(["-f"] if short else []),
            *("--format", "docker"),
            metavar="TEMPLATE",
            help="The same as -o go-template=TEMPLATE; `json` is -o json.",
        ),
        click.option("--template", metavar="TEMPLATE", help="The template of -o go-template."),
    ]
    if listing:
        own += [
            click.option("-q", "--quiet", is_flag=True, help="Print only ids."),
            click.option("--no-trunc", is_flag=True, help="Print ids in full length."),
            click.option("--no-headers", is_flag=True, help="Print tables without the header."),
        ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(
            *arguments: Any, output: str, docker: str | None, template: str | None, **rest: Any
        ) -> Any:
            flags = {name: rest.pop(name) for name in ("quiet", "no_trunc") if listing}
            headers = not (listing and rest.pop("no_headers"))
            form, compiled = _parse(output, docker, template, formats)
            rest["output"] = OutputOptions(form, compiled, headers=headers, **flags)
            return command(*arguments, **rest)

        for option in reversed(own):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _parse(
    output: str, docker: str | None, template: str | None, formats: Sequence[str]
) -> tuple[str, Template | None]:
    """Return the format, and the parsed template or None, from the values of -o (`output`),
    --format (`docker`) and --template. Raises InvalidArgument."""
    if docker is not None:
        output = docker if docker in formats else f"go-template={docker}"
    text = next((output.removeprefix(p) for p in TEMPLATES if output.startswith(p)), None)
    if output in ("go-template", "template"):
        if not template:
            raise InvalidArgument("-o go-template needs --template, or -o go-template=TEMPLATE")
        text = template
    if text is None and output not in formats:
        raise InvalidArgument(
            f"-o {output}: expected one of {', '.join(formats)}, go-template=TEMPLATE"
        )
    if text is None:
        return output, None
    from cri_server.cli.output.template import Template

    return output, Template(text)


def watch(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --watch and --interval to a verb. Its function gets `watching`: the interval
    in seconds, or None without --watch."""

    @click.option("-w", "--watch", is_flag=True, help="Repeat the output until interrupted.")
    @click.option(
        "--interval",
        type=click.FloatRange(0.1, 86400),
        default=WATCH_S,
        show_default=True,
        metavar="SECONDS",
        help="The interval of --watch.",
    )
    @functools.wraps(command)
    def wrapped(*arguments: Any, watch: bool, interval: float, **rest: Any) -> Any:
        return command(*arguments, watching=interval if watch else None, **rest)

    return wrapped


def repeat(draw: Callable[[], str], watching: float | None) -> None:
    """Print the text that `draw` returns. With `watching`, repeat every `watching` seconds until
    interrupted. On a terminal, each text replaces the previous one. Elsewhere, a text is printed
    only if it differs from the previous one."""
    previous = None
    while True:
        text = draw()
        if watching is None:
            say(text)
            return
        if sys.stdout.isatty():
            say(CLEAR + text)
        elif text != previous:
            say(text)
        # A pipe is block-buffered, and its reader would wait for 8 KiB.
        sys.stdout.flush()
        previous = text
        time.sleep(watching)


# -- tables and colours


def table(header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text. Columns are as wide as their widest cell, and cells that name a state
    are coloured. `say` removes the colours where stdout is no terminal."""
    cells_of_rows = [[printable(cell) for cell in row] for row in rows]
    if header is not None:
        cells_of_rows.insert(0, list(header))
    widths = [max(map(len, column)) for column in zip(*cells_of_rows, strict=True)]
    lines = []
    for number, row in enumerate(cells_of_rows):
        is_header = header is not None and number == 0
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        lines.append("  ".join(cells if is_header else map(coloured, cells)).rstrip())
    return "\n".join(lines)


def coloured(cell: str) -> str:
    """Return the text of a table cell, coloured if it names a state."""
    colour = COLOURS.get(cell.strip().partition(" (")[0])
    return click.style(cell, fg=colour) if colour else cell


def say(text: str) -> None:
    """Print a text. Removes colours if NO_COLOR is set (no-color.org) or stdout is no terminal."""
    if text:
        click.echo(text, color=False if os.environ.get("NO_COLOR") else None)
