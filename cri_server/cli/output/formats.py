"""The one place for output formats: `-o table|wide|json|yaml|name`, a template, and `-q`; colours
and terminals.

JSON is CRI's message as protobuf has it (camelCase, 64-bit numbers as strings, with the fields that
are empty), so that what reads crictl's reads ours.
"""

from __future__ import annotations

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
CLEAR = "\x1b[H\x1b[2J\x1b[3J"
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
    """A column of a table; `wide`: only in wide tables."""

    title: str
    of: Callable[[Item], str]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """What a list verb shows: the JSON key of all its items, the columns, an item's JSON, its id
    and its name."""

    key: str
    columns: Sequence[Column[Item]]
    document: Callable[[Item], dict[str, Any]]
    identity: Callable[[Item], str]
    name: Callable[[Item], str]


JSON_CONTROLS = {code: f"\\u{code:04x}" for code in range(127, 160)}
VISIBLE_IN_LINES = {code: text for code, text in VISIBLE.items() if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class Output:
    """How the user wants it."""

    format: str = "table"
    template: Template | None = None
    quiet: bool = False
    no_trunc: bool = False
    headers: bool = True

    def short(self, identifier: str) -> str:
        """An id as a table shows it."""
        identifier = identifier.rpartition(":")[2]
        return identifier if self.no_trunc else identifier[:SHORT]

    def listed(self, listing: Listing[Item], items: Sequence[Item]) -> str:
        """The items as text, without a newline at the end. Raises InvalidArgument for a template
        that does not fit."""
        if self.quiet:
            return "\n".join(map(listing.identity, items))
        if self.template is not None:
            return "\n".join(self._rendered(self._view(listing, item)) for item in items)
        if self.format == "name":
            return "\n".join(map(listing.name, items))
        if self.format in ("json", "yaml"):
            return self.document({listing.key: [listing.document(item) for item in items]})
        columns = [c for c in listing.columns if self.format == "wide" or not c.wide]
        rows = [[c.of(item) for c in columns] for item in items]
        return table([c.title for c in columns] if self.headers else None, rows)

    def _view(self, listing: Listing[Item], item: Item) -> dict[str, Any]:
        """What a template sees of an item: its JSON, and the columns by their titles: `{{.POD}}`."""
        cells = {c.title.replace(" ", ""): c.of(item) for c in listing.columns}
        found = listing.document(item)
        return {**found, **{title: cell for title, cell in cells.items() if title not in found}}

    def document(self, found: Any) -> str:
        """One object as JSON, YAML or by the template."""
        if self.template is not None:
            return self._rendered(found)
        if self.format == "yaml":
            import yaml  # 18 ms that nobody else pays

            return yaml.safe_dump(found, sort_keys=False, allow_unicode=True).rstrip("\n")
        return as_json(found, indent=2)

    def _rendered(self, found: Any) -> str:
        """By the template; for a terminal without the control characters of an image or a
        container, for programs as it is."""
        assert self.template is not None
        text = self.template.render(found)
        return text.translate(VISIBLE_IN_LINES) if sys.stdout.isatty() else text


def as_json(found: Any, indent: int | None = None) -> str:
    """JSON whose control characters are escaped, those of ISO 6429 beyond ASCII too: terminals take
    U+009B for ESC [."""
    return json.dumps(found, indent=indent, ensure_ascii=False).translate(JSON_CONTROLS)


def plain(message: Any) -> dict[str, Any]:
    """A message as protobuf's JSON has it, with the fields that are empty."""
    from google.protobuf.json_format import MessageToDict  # not for tables

    found: dict[str, Any] = MessageToDict(message, always_print_fields_with_no_presence=True)
    return found


def with_info(message: Any) -> dict[str, Any]:
    """A verbose answer: what its `info` holds as JSON texts are objects, as crictl shows them."""
    found = plain(message)
    info = found.pop("info", {})
    if not info:
        return found
    for key, text in info.items():
        try:
            info[key] = json.loads(text)
        except ValueError:
            pass
    nested = info.pop("info", None)
    return {**found, "info": {**info, **nested} if isinstance(nested, Mapping) else nested or info}


# -- options


def options(
    formats: Sequence[str] = FORMATS, *, listing: bool = True, short: bool = False
) -> Callable[[Any], Any]:
    """The options of a verb's output, handed to it as `how`. `short`: -f is --format, as docker's
    inspect has it."""
    shown = "|".join((*formats, "go-template=TEMPLATE"))
    own = [
        click.option("-o", "--output", default=formats[0], metavar=shown, help="Output format."),
        click.option(*(["-f"] if short else []), "--format", "docker", metavar="TEMPLATE", help="The same as -o go-template=TEMPLATE; `json` is -o json."),
        click.option("--template", metavar="TEMPLATE", help="For -o go-template."),
    ]  # fmt: skip
    if listing:
        own += [
            click.option("-q", "--quiet", is_flag=True, help="Only ids."),
            click.option("--no-trunc", is_flag=True, help="Whole ids."),
            click.option("--no-headers", is_flag=True, help="A table without its first line."),
        ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapped(
            *arguments: Any, output: str, docker: str | None, template: str | None, **rest: Any
        ) -> Any:
            names = ("quiet", "no_trunc", "no_headers") if listing else ()
            flags = {name: rest.pop(name) for name in names}
            rest["how"] = parse(output, docker, template, formats, **flags)
            return command(*arguments, **rest)

        for option in reversed(own):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def parse(
    output: str,
    docker: str | None,
    template: str | None,
    formats: Sequence[str] = FORMATS,
    *,
    quiet: bool = False,
    no_trunc: bool = False,
    no_headers: bool = False,
) -> Output:
    """The options as Output. Raises InvalidArgument."""
    if docker is not None:
        output = docker if docker in formats else f"go-template={docker}"
    text = next((output.removeprefix(p) for p in TEMPLATES if output.startswith(p)), None)
    if output in ("go-template", "template"):
        if not template:
            raise InvalidArgument("-o go-template: needs --template, or -o go-template=TEMPLATE")
        text = template
    if text is None and output not in formats:
        raise InvalidArgument(
            f"-o {output}: expected one of {', '.join(formats)}, go-template=TEMPLATE"
        )
    compiled = None
    if text is not None:
        from cri_server.cli.output.template import Template  # for few

        compiled = Template(text)
    return Output(output, compiled, quiet, no_trunc, not no_headers)


def watch(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--watch` and `--interval` of a verb, which gets `watching`: None, or seconds."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, watch: bool, interval: float, **rest: Any) -> Any:
        return command(*arguments, watching=interval if watch else None, **rest)

    seconds = click.FloatRange(0.1, 86400)
    wrapped = click.option(
        "--interval",
        type=seconds,
        default=WATCH_S,
        show_default=True,
        metavar="SECONDS",
        help="For --watch.",
    )(wrapped)
    return click.option(
        "-w", "--watch", is_flag=True, help="Show it again and again until interrupted."
    )(wrapped)


def repeat(draw: Callable[[], str], watching: float | None) -> None:
    """Show what `draw` makes, once or until interrupted: on a terminal in the same place, elsewhere
    when it has changed."""
    shown = None
    while True:
        text = draw()
        if watching is None:
            say(text)
            return
        if sys.stdout.isatty():
            say(CLEAR + text)
        elif text != shown:
            say(text)
        sys.stdout.flush()
        shown = text
        time.sleep(watching)


# -- tables and colours


def table(header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; states have their colours where `say` lets them
    through."""
    shown = [[printable(cell) for cell in row] for row in rows]
    every = [list(header), *shown] if header is not None else shown
    if not every:
        return ""
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    lines = []
    for number, row in enumerate(every):
        is_header = header is not None and number == 0
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = cells[-1].rstrip()
        lines.append("  ".join(cells if is_header else map(coloured, cells)).rstrip())
    return "\n".join(lines)


def coloured(cell: str) -> str:
    """A cell that is a state in the colour of it."""
    colour = COLOURS.get(cell.strip().partition(" (")[0])
    return click.style(cell, fg=colour) if colour else cell


def say(text: str) -> None:
    """A text for the user; its colours are dropped for NO_COLOR (no-color.org) and where stdout is
    no terminal."""
    if text:
        click.echo(text, color=False if os.environ.get("NO_COLOR") else None)
