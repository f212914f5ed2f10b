"""Loads a `Config` from files and flags. Each file is checked alone, so that errors name it; then
all are merged."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from cri_server.config import sources
from cri_server.config.check import problems as check_values
from cri_server.config.model import Config
from cri_server.config.sources import ConfigSource, Key
from pyrunc.errors import InvalidSpec

DEFAULT_PATH = Path("/etc/pyrunc/config.toml")
COMMAND_LINE, DEFAULT = "command line", "default"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its files, in the order of reading. `origins`: for each key that was set,
    the file that set it, or None for the command line."""

    config: Config
    files: tuple[Path, ...]
    origins: dict[Key, ConfigSource | None]

    def origin(self, key: Key) -> str:
        """Return where `key` was set: `FILE:LINE`, `command line` or `default`."""
        return _place(key, self.origins)


Problems = Callable[[Config], Iterable[InvalidSpec]]


def load(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    """Load the file `path`, then its drop-ins, then `overrides` ({`table.key`: value}, where None
    is ignored). If `path` is None, the default path is read; that file may be missing.

    Raises InvalidSpec: its path names file, line and key, its text says what is expected.
    """
    return load_with_origins(path, overrides).config


def load_with_origins(
    path: Path | None, overrides: Mapping[str, Any], also: Problems = lambda config: ()
) -> LoadedConfig:
    """Load `path`, its drop-ins and `overrides`; return the configuration, and which file set each
    key.

    `also` checks the merged configuration further, for example against this machine, and yields
    errors. Raises InvalidSpec for the first error, with `FILE:LINE`.
    """
    files = sources.read(path or DEFAULT_PATH, required=path is not None)
    values: dict[str, Any] = {}
    origins: dict[Key, ConfigSource | None] = {}
    for source in files:
        # Each file is checked before the merge: a later check could not name file and line.
        for _, problem in problems(source):
            raise problem
        sources.merge(values, source.values, source, origins)
    for key, value in overrides.items():
        if value is not None:
            sources.merge(values, _nested(tuple(key.split(".")), value), None, origins)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        name, text = _parsed(error)
        raise InvalidSpec(f"{COMMAND_LINE}: {name}", text) from None
    for problem in itertools.chain(check_values(config), also(config)):
        raise _with_place(problem, origins)
    return LoadedConfig(config, tuple(source.path for source in files), origins)


def all_problems(path: Path | None, also: Problems = lambda config: ()) -> list[InvalidSpec]:
    """Return the first error of each key in the files that `load` reads: unknown keys, wrong types,
    wrong values, and the errors that `also` yields. Raises InvalidSpec for an unreadable file."""
    errors_by_place: dict[str, InvalidSpec] = {}
    values: dict[str, Any] = {}
    origins: dict[Key, ConfigSource | None] = {}
    for source in sources.read(path or DEFAULT_PATH, required=path is not None):
        wrong = dict(problems(source))
        errors_by_place |= {
            f"{source.path}: {'.'.join(key)}": error for key, error in wrong.items()
        }
        sources.merge(values, _without(source.values, wrong), source, origins)
    config = msgspec.convert(values, Config)
    for error in itertools.chain(check_values(config), also(config)):
        errors_by_place.setdefault(error.path, _with_place(error, origins))
    return list(errors_by_place.values())


def problems(source: ConfigSource) -> Iterator[tuple[Key, InvalidSpec]]:
    """Yield (key, error) for each unknown key of a file, and for each key whose value has a wrong
    type."""
    from cri_server.config.unknown import unknown_keys

    unknown = dict(unknown_keys(source.values))
    for key, text in unknown.items():
        yield key, InvalidSpec(f"{source.place(key)}: {'.'.join(key)}", text)
    # Each key is checked alone, because msgspec's error names the first wrong key only.
    for key, value in sources.leaves(_without(source.values, unknown)):
        try:
            msgspec.convert(_nested(key, value), Config)
        except msgspec.ValidationError as error:
            name, text = _parsed(error)
            yield key, InvalidSpec(f"{source.place(key)}: {name}", text)


def _nested(key: Key, value: Any) -> dict[str, Any]:
    for name in reversed(key):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _without(values: dict[str, Any], keys: Collection[Key], before: Key = ()) -> dict[str, Any]:
    """Return a copy of the nested tables `values` without `keys`. `keys`: full keys, from the top
    level of the file on; `before`: the full key of the table `values` itself."""
    return {
        name: _without(value, keys, (*before, name)) if isinstance(value, dict) else value
        for name, value in values.items()
        if (*before, name) not in keys
    }


def _parsed(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split msgspec's "Expected … - at `$.table.key`" into the key and the expectation."""
    # msgspec's errors have no attributes for path and expectation, only a text.
    text, _, place = str(error).partition(" - at ")
    key = place.strip("`").removeprefix("$").removeprefix(".")
    chosen = re.fullmatch(r"Invalid enum value (.*)", text)
    if chosen:
        return key, f"{chosen[1]} is not one of {', '.join(_choices(key))}"
    return key, text[:1].lower() + text[1:]


def _choices(key: str) -> list[str]:
    """Return the permitted values of a key with a Literal type. Does not support the keys of
    [runtimes.NAME], none of which has such a type."""
    kind: Any = Config
    for name in key.split("."):
        kind = {field.name: field.type for field in msgspec.structs.fields(kind)}[name]
    return sorted(get_args(kind.__origin__))


def _with_place(error: InvalidSpec, origins: Mapping[Key, ConfigSource | None]) -> InvalidSpec:
    """Return the error of a check with `FILE:LINE` or `command line` in front of its key. The error
    stays unchanged if neither a file nor the command line set the key."""
    place = _place(tuple(re.sub(r"\[.*", "", error.path).split(".")), origins)
    return error if place == DEFAULT else InvalidSpec(f"{place}: {error.path}", error.detail)


def _place(key: Key, origins: Mapping[Key, ConfigSource | None]) -> str:
    """Return where a key was set: `FILE:LINE`, `command line` or `default`. A table has the origin
    of its first key that was set."""
    sources_of_key = [source for each, source in origins.items() if each[: len(key)] == key]
    if not sources_of_key:
        return DEFAULT
    source = sources_of_key[0]
    return COMMAND_LINE if source is None else source.place(key)
