"""Compares two configurations: lists the keys with a new value, and says for each whether a running
server applies the new value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cri_server.config.model import Config


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A key with a new value. `reloads`: whether a running server applies the new value on
    SIGHUP."""

    key: str
    before: Any
    after: Any
    reloads: bool


def changes(before: Config, after: Config) -> list[ConfigChange]:
    """Return a change for each key whose value differs between `before` and `after`, in the order
    of the tables in `Config`. [runtimes.NAME] counts as one key."""
    result = [
        ConfigChange(f"{table}.{key}", old, new, reloads)
        for table, key, reloads in keys()
        if (old := getattr(getattr(before, table), key))
        != (new := getattr(getattr(after, table), key))
    ]
    for name in sorted({*before.runtimes, *after.runtimes}):
        old, new = (msgspec.to_builtins(each.runtimes.get(name)) for each in (before, after))
        if old != new:
            result.append(ConfigChange(f"runtimes.{name}", old, new, reloads=True))
    return result


def after_reload(before: Config, after: Config) -> Config:
    """Return the effective configuration of a server that ran with `before` and has reloaded
    `after`. Keys that need a restart have the values of `before`, all others those of `after`."""
    for table, key, reloads in keys():
        if not reloads:
            former = {key: getattr(getattr(before, table), key)}
            changed = msgspec.structs.replace(getattr(after, table), **former)
            after = msgspec.structs.replace(after, **{table: changed})
    return after


def keys() -> Iterator[tuple[str, str, bool]]:
    """Yield (table, key, reloads) for each key; `reloads` is True if a running server applies a new
    value. Leaves out [runtimes.NAME]: a running server applies new values of all keys of this
    table."""
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
