"""Finds unknown keys and tables in a configuration. Suggests a key with a similar name, or the
table that has a key of this name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cri_server.config.sources import Key


def unknown_keys(values: dict[str, Any], table: type[msgspec.Struct]) -> Iterator[tuple[Key, str]]:
    """Yield (key, message) for each key of `values` that `table` does not have. The message may
    suggest the right key."""
    kind = msgspec.inspect.type_info(table)
    yield from _unknown(values, kind, (), kind)


def _unknown(
    values: Any, kind: msgspec.inspect.Type, before: Key, root: msgspec.inspect.Type
) -> Iterator[tuple[Key, str]]:
    if isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if not isinstance(values, dict):
        return
    if isinstance(kind, msgspec.inspect.DictType):
        for name, value in values.items():
            yield from _unknown(value, kind.value_type, (*before, name), root)
    if not isinstance(kind, msgspec.inspect.StructType):
        return
    fields = {field.name: field.type for field in kind.fields}
    for name, value in values.items():
        if name in fields:
            yield from _unknown(value, fields[name], (*before, name), root)
        else:
            yield (*before, name), _sentence(name, list(fields), before, root)


def _sentence(name: str, names: list[str], before: Key, root: msgspec.inspect.Type) -> str:
    what = "no such key" if before else "no such table"
    elsewhere = _tables_with(name, root)
    if elsewhere:
        return f"{what}; it belongs to [{elsewhere[0]}]"
    import difflib  # takes 150 KiB, and few configurations have an unknown key

    close = difflib.get_close_matches(name, names, 1)
    if close:
        return f"{what}; did you mean {close[0]}?"
    return f"{what}; expected {'one of ' if len(names) > 1 else ''}{', '.join(sorted(names))}"


def _tables_with(name: str, root: msgspec.inspect.Type) -> list[str]:
    assert isinstance(root, msgspec.inspect.StructType)
    tables = [
        (field.name, field.type)
        for field in root.fields
        if isinstance(field.type, msgspec.inspect.StructType)
    ]
    return [table for table, kind in tables if name in {field.name for field in kind.fields}]
