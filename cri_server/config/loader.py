"""From files and flags to a `Config`: each file by itself is checked, so that an error names it; then all are merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cri_server.config import sources
from cri_server.config.check import check
from cri_server.config.model import Config
from cri_server.config.sources import Key, Source
from pyrunc.errors import InvalidSpec

DEFAULT_PATH = Path("/etc/pyrunc/config.toml")
COMMAND_LINE, DEFAULT = "command line", "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """`files` were read, in this order; `origins`: what each value that is no default comes from, None the command line."""

    config: Config
    files: tuple[Path, ...]
    origins: dict[Key, Source | None]

    def origin(self, key: Key) -> str:
        """`FILE:LINE`, `command line` or `default`."""
        return _place(key, self.origins)


Check = Callable[[Config], None]


def load(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """The configuration of `path` (None: the default path, which may be missing) and its drop-ins, then `overrides` by
    `table.key`; None overrides nothing.

    Raises InvalidSpec whose path names file, line and key, and whose text says what is expected there.
    """
    return load_with_origins(path, overrides).config


def load_with_origins(
    path: Path | None, overrides: Mapping[str, Any], also: Check = lambda config: None
) -> Loaded:
    """As `load`. `also` checks more of the whole, such as what this machine permits: its InvalidSpec has the path
    `table.key` and gets the place."""
    found = sources.read(path or DEFAULT_PATH, required=path is not None)
    values: dict[str, Any] = {}
    origins: dict[Key, Source | None] = {}
    for source in found:
        for problem in problems(source):
            raise problem
        sources.merge(values, source.values, source, origins)
    sources.merge(values, _tree(overrides), None, origins)
    try:
        config = msgspec.convert(values, Config)
        check(config)
        also(config)
    except msgspec.ValidationError as error:
        key, text = _parsed(error)
        raise InvalidSpec(f"{COMMAND_LINE}: {key}", text) from None
    except InvalidSpec as error:
        raise _placed(error, origins) from None
    return Loaded(config, tuple(source.path for source in found), origins)


def problems(source: Source) -> Iterator[InvalidSpec]:
    """All unknown keys of a file; without any, the first value that has another type than its key."""
    from cri_server.config.unknown import unknown_keys

    known = True
    for key, text in unknown_keys(source.values, Config):
        known = False
        yield InvalidSpec(f"{source.place(key)}: {'.'.join(key)}", text)
    if not known:
        return
    try:
        msgspec.convert(source.values, Config)
    except msgspec.ValidationError as error:
        name, text = _parsed(error)
        key = tuple(re.sub(r"\[.*", "", name).split("."))
        yield InvalidSpec(f"{source.place(key)}: {name}", text)


def _tree(overrides: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is not None:
            table, _, name = key.partition(".")
            tree.setdefault(table, {})[name] = value
    return tree


def _parsed(error: msgspec.ValidationError) -> tuple[str, str]:
    """msgspec says "Expected … - at `$.table.key`"; the key and what is expected."""
    text, _, place = str(error).partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".")
    return key, text[:1].lower() + text[1:]


def _placed(error: InvalidSpec, origins: Mapping[Key, Source | None]) -> InvalidSpec:
    """A check's error with the place of the key, when somebody set it."""
    place = _place(tuple(re.sub(r"\[.*", "", error.path).split(".")), origins)
    return error if place == DEFAULT else InvalidSpec(f"{place}: {error.path}", error.detail)


def _place(key: Key, origins: Mapping[Key, Source | None]) -> str:
    """Of a table that of its first key."""
    found = [source for each, source in origins.items() if each[: len(key)] == key]
    if not found:
        return DEFAULT
    source = found[0]
    return COMMAND_LINE if source is None else source.place(key)
