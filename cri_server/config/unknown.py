"""Finds unknown keys and tables in a configuration. Suggests a key with a similar name, or the
table to which the unknown key belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import msgspec

from cri_server.config.model import Config
from cri_server.config.sources import Key


def unknown_keys(
    values: dict[str, Any], table: type[msgspec.Struct] = Config, before: Key = ()
) -> Iterator[tuple[Key, str]]:
    """Yield (full key, message) for each key of `values` that `table` does not have. The message
    may suggest the right key. `before`: the full key of the table `values`."""
    kinds = {field.name: field.type for field in msgspec.structs.fields(table)}
    for name, value in values.items():
        key = (*before, name)
        kind: Any = kinds.get(name)
        if name not in kinds:
            yield key, _sentence(name, list(kinds), before)
        elif get_origin(kind) is dict:
            tables = value.items() if isinstance(value, dict) else ()
            for each, entries in tables:
                if isinstance(entries, dict):
                    yield from unknown_keys(entries, get_args(kind)[1], (*key, each))
        elif hasattr(kind, "__struct_fields__") and isinstance(value, dict):
            yield from unknown_keys(value, kind, key)


def _sentence(name: str, names: list[str], before: Key) -> str:
    what = "no such key" if before else "no such table"
    elsewhere = _tables_with(name)
    if elsewhere:
        return f"{what}; it belongs to [{elsewhere[0]}]"
    import difflib  # takes 150 KiB, and few configurations have an unknown key

    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"{what}; did you mean {close[0]}?"
    return f"{what}; expected {'one of ' if len(names) > 1 else ''}{', '.join(sorted(names))}"


def _tables_with(name: str) -> list[str]:
    tables = msgspec.structs.fields(Config)
    return [each.name for each in tables if name in getattr(each.type, "__struct_fields__", ())]
