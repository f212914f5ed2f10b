"""The text of the installed `/etc/pyrunc/config.toml`, generated from `cri_server.config`: every
key with its explanation and default.

All keys are commented out, so that the defaults of a later version apply to keys that the
administrator has not changed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from cri_server.config import Config

WIDTH = 100
HEAD = """\
# Configuration of pyrunc-cri. Each key is a comment with its default. Files in config.toml.d/
# override this one key by key, in the order of their names; flags of `serve` override both.
# `systemctl reload pyrunc-cri` applies changes. Keys with "Needs a restart." change at a restart,
# while pods run on. `pyrunc-cri config check` finds errors; `pyrunc-cri config dump --origin`
# prints each value with its file and line. `pyrunc-cri serve --config FILE` reads another file.
"""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the configuration file. `about`: its explanation, with the permitted values;
    `default`: the default value as TOML."""

    name: str
    about: str
    default: str


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the configuration file. `repeated`: the administrator may add any number of such
    tables, `[name.NAME]`, and chooses NAME."""

    name: str
    about: str
    keys: tuple[Key, ...]
    repeated: bool = False


def sections() -> Iterator[Section]:
    """Yield the tables of the configuration with their keys, in the order of the fields of
    `Config`."""
    for field in _fields(Config):
        table, repeated = field.type, False
        if isinstance(table, msgspec.inspect.DictType):
            table, repeated = table.value_type, True
        assert isinstance(table, msgspec.inspect.StructType)
        keys = tuple(_key(entry) for entry in _fields(table.cls))
        name = f"{field.name}.NAME" if repeated else field.name
        yield Section(name, (table.cls.__doc__ or "").split("\n")[0], keys, repeated)


def text() -> str:
    """Return the text of the installed config.toml."""
    parts = [HEAD]
    for section in sections():
        parts.append(f"\n# {section.about}\n{'#' * section.repeated}[{section.name}]\n")
        for key in section.keys:
            indent = "  " * section.repeated
            parts += [_comment(key.about), f"#{indent}{key.name} = {key.default}\n"]
    return "".join(parts)


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _fields(table: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    info = msgspec.inspect.type_info(table)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def _key(field: msgspec.inspect.Field) -> Key:
    kind, about = field.type, ""
    if isinstance(kind, msgspec.inspect.Metadata):
        about = str((kind.extra_json_schema or {}).get("description", ""))
        if not (kind.extra or {}).get("reloads", True):
            about += " Needs a restart."
        kind = kind.type
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None:  # a handler without the key uses that of [containers]
        value = getattr(Config().containers, field.name)
    # Strings, numbers, booleans and lists of them have the same form in TOML as in JSON.
    default = json.dumps(value, ensure_ascii=False)
    return Key(field.name, f"{about} {_values(kind)}".strip(), default)


def _values(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return f"One of {', '.join(map(str, values))}."
        case msgspec.inspect.BoolType():
            return "true or false."
        case msgspec.inspect.FloatType(gt=0):
            return "Seconds, more than 0."
        case msgspec.inspect.IntType(ge=low, le=high) if low is not None and high is not None:
            return f"{low} to {high}."
    return ""


def markdown() -> str:
    """Return the tables of docs/configure.md."""
    parts = []
    for section in sections():
        parts.append(
            f"## `[{section.name}]`\n\n{section.about}\n\n| key | default | what |\n|---|---|---|\n"
        )
        for key in section.keys:
            about = key.about.replace("|", "\\|")
            parts.append(f"| `{key.name}` | `{key.default}` | {about} |\n")
        parts.append("\n")
    return "".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
