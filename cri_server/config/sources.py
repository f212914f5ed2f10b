"""Reads the files of a configuration: `config.toml`, then `config.toml.d/*.toml` in the order of
their names. Finds the line of each key.

A drop-in overrides earlier files key by key. A list in a drop-in replaces the earlier list.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyrunc.errors import InvalidSpec

Key = tuple[str, ...]  # table, key; longer in a table of tables


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A parsed configuration file. `text`: its content, in which `place` looks up line numbers."""

    path: Path
    text: str
    values: dict[str, Any]

    def place(self, key: Key) -> str:
        """Return `FILE:LINE` of a key or of the nearest enclosing table; `FILE` if the file has
        neither."""
        lines_by_key = lines(self.text)
        for length in range(len(key), 0, -1):
            if key[:length] in lines_by_key:
                return f"{self.path}:{lines_by_key[key[:length]]}"
        return str(self.path)


def read(path: Path, *, required: bool) -> list[ConfigSource]:
    """Read the file `path` and its drop-ins. Without `required` the file may be missing. Raises
    InvalidSpec; its path names the file that is invalid or cannot be read."""
    files = [path] if required or path.exists() else []
    return [_read(file) for file in (*files, *drop_ins(path))]


def drop_ins(path: Path) -> list[Path]:
    """Return the files `PATH.d/*.toml`, sorted by name. Leaves out hidden files, which editors
    leave behind. Returns no files if there is no `PATH.d`. Raises InvalidSpec if `PATH.d` cannot be
    read."""
    folder = path.with_name(path.name + ".d")
    try:
        names = sorted(
            name for name in os.listdir(folder) if name.endswith(".toml") and name[0] != "."
        )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidSpec(str(folder), f"cannot be read: {_reason(error)}") from None
    return [folder / name for name in names]


def _read(path: Path) -> ConfigSource:
    try:
        text = path.read_text(encoding="utf-8")
        return ConfigSource(path, text, tomllib.loads(text))
    except FileNotFoundError:
        raise InvalidSpec(str(path), "no such file") from None
    except OSError as error:
        raise InvalidSpec(str(path), f"cannot be read: {_reason(error)}") from None
    # tomllib parses nested arrays recursively: a thousand brackets exceed Python's limit.
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSpec(str(path), f"not TOML: {error}") from None


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


@functools.lru_cache(8)
def lines(text: str) -> dict[Key, int]:
    """Return the line number, from 1, of each key and each table of a valid TOML file."""
    # tomllib does not report the lines of keys.
    result: dict[Key, int] = {}
    table: Key = ()
    statement, first = "", 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        first = first if statement else number
        statement += line
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            table = _deepest(values)
            result.setdefault(table, first)
        else:
            for key, _ in leaves(values):
                result.setdefault(table + key, first)
        statement = ""
    return result


def _deepest(values: Any) -> Key:
    """Return the key of the table that a header opens, such as `("a", "b")` for `[a.b]` and
    `[[a.b]]`. `values`: the parsed header."""
    key: Key = ()
    while values:
        if isinstance(values, list):
            values = values[0]
            continue
        name, values = next(iter(values.items()))
        key += (name,)
    return key


def leaves(values: dict[str, Any], before: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the full key and the value of each setting in nested tables; an empty table counts as a
    value. `before`: the full key of the table `values`."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*before, name))
        else:
            yield (*before, name), value


def merge(
    into: dict[str, Any],
    values: dict[str, Any],
    source: ConfigSource | None,
    origins: dict[Key, ConfigSource | None],
    before: Key = (),
) -> None:
    """Write each key of `values` into the nested tables `into`. Record `source` (None: the command
    line) for each key in `origins`. `before`: the full key of the table `values`."""
    for name, value in values.items():
        key = (*before, name)
        if isinstance(value, dict):
            merge(into.setdefault(name, {}), value, source, origins, key)
        else:
            into[name] = value
            origins[key] = source
