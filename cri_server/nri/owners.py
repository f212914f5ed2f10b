"""Which plugin set which field of which container: two plugins that set the same one contradict
each other.

A plugin may take over what another one set by removing it first. The result travels to validators
as `OwningPlugins`, where a leading `-` marks the plugin that removed an entry.
"""

from __future__ import annotations

from typing import Any

from cri_server.api import nri_pb2 as api
from pyrunc.errors import WrongState

REMOVED = "-"


class Conflict(WrongState):
    """Two plugins set the same field."""


class Owners:
    """The owners of all containers that one request is about."""

    def __init__(self) -> None:
        self.message = api.OwningPlugins()

    def claim(self, container: str, field: int, plugin: str, key: str | None = None) -> None:
        """`plugin` sets the field, or its entry `key`. Raises Conflict."""
        owners = self._of(container)
        entries: Any = owners.simple if key is None else owners.compound[field].owners
        entry = field if key is None else key
        owner: str = entries.get(entry, "")
        if owner and owner != REMOVED + plugin:
            what = api.Field.Name(field) + (f" {key}" if key is not None else "")  # type: ignore[arg-type]
            raise Conflict(
                f"NRI plugins {plugin} and {owner.removeprefix(REMOVED)} both set {what}"
            )
        entries[entry] = plugin

    def clear(self, container: str, field: int, plugin: str, key: str | None = None) -> None:
        """`plugin` removes the field, or its entry, whoever set it; it may set it anew."""
        owners = self._of(container)
        if key is None:
            owners.simple[field] = REMOVED + plugin
        else:
            owners.compound[field].owners[key] = REMOVED + plugin

    def add(self, container: str, field: int, plugin: str) -> None:
        """`plugin` adds to a field that many may add to."""
        owners = self._of(container)
        before = owners.simple.get(field, "")
        owners.simple[field] = f"{before},{plugin}" if before else plugin

    def snapshot(self, container: str) -> api.FieldOwners:
        """What to `restore` when a plugin's wish is dropped as a whole."""
        copy = api.FieldOwners()
        copy.CopyFrom(self._of(container))
        return copy

    def restore(self, container: str, owners: api.FieldOwners) -> None:
        """Forget what was claimed since `snapshot`."""
        self.message.owners[container].CopyFrom(owners)

    def _of(self, container: str) -> api.FieldOwners:
        return self.message.owners[container]
