"""What differs between two configurations, and what of it a running server takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cri_server.config.model import Config


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value. `reloads`: whether a running server takes it."""

    key: str
    before: Any
    after: Any
    reloads: bool


def changes(before: Config, after: Config) -> list[Change]:
    """In the order of the tables."""
    found = [
        Change(f"{table}.{key}", old, new, reloads)
        for table, key, reloads in keys()
        if (old := getattr(getattr(before, table), key))
        != (new := getattr(getattr(after, table), key))
    ]
    for name in sorted({*before.runtimes, *after.runtimes}):
        old, new = (msgspec.to_builtins(each.runtimes.get(name)) for each in (before, after))
        if old != new:
            found.append(Change(f"runtimes.{name}", old, new, reloads=True))
    return found


def taken(before: Config, after: Config) -> Config:
    """`after`, but for what cannot change while the server runs."""
    kept: dict[str, dict[str, Any]] = {}
    for table, key, reloads in keys():
        if not reloads:
            kept.setdefault(table, {})[key] = getattr(getattr(before, table), key)
    tables = {
        table: msgspec.structs.replace(getattr(after, table), **values)
        for table, values in kept.items()
    }
    return msgspec.structs.replace(after, **tables)


def keys() -> Iterator[tuple[str, str, bool]]:
    """Each table, key and whether a running server takes another value; not those of
    [runtimes.NAME], which reload."""
    for table in msgspec.structs.fields(Config):
        if table.name == "runtimes":
            continue
        for field in msgspec.structs.fields(table.type):
            metadata = [each for each in field.type.__metadata__ if isinstance(each, msgspec.Meta)]
            yield (
                table.name,
                field.name,
                all((each.extra or {}).get("reloads", True) for each in metadata),
            )
