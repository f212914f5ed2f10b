"""Records which plugin set which field of a container. Raises Conflict if two plugins set the same
field.

A plugin may override a field by removing it first. Validators get the owners as `OwningPlugins`, in
which `-PLUGIN` means that PLUGIN has removed the field or entry.
"""

from __future__ import annotations

from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.store.model import copy
from pyrunc.errors import WrongState

REMOVED = "-"


class Conflict(WrongState):
    """Two plugins set the same field."""


class Owners:
    """Which plugin owns each field of the containers in one request."""

    def __init__(self) -> None:
        self.message = api.OwningPlugins()

    def claim(self, container: str, field: int, plugin: str, key: str | None = None) -> None:
        """Record that `plugin` sets the field, or the entry `key` of the field. Raises Conflict if
        another plugin has set it."""
        owners = self.message.owners[container]
        entries: Any = owners.simple if key is None else owners.compound[field].owners
        entry = field if key is None else key
        owner: str = entries.get(entry, "")
        if owner and owner != REMOVED + plugin:
            what = api.Field.Name(field) + (  # type: ignore[arg-type]
                f" {key}" if key is not None else ""
            )
            raise Conflict(
                f"NRI plugins {plugin} and {owner.removeprefix(REMOVED)} both set {what}"
            )
        entries[entry] = plugin

    def clear(self, container: str, field: int, plugin: str, key: str | None = None) -> None:
        """Record that `plugin` removes the field, or the entry `key` of the field. Afterwards the
        same plugin may set it; any other plugin gets a Conflict."""
        owners = self.message.owners[container]
        if key is None:
            owners.simple[field] = REMOVED + plugin
        else:
            owners.compound[field].owners[key] = REMOVED + plugin

    def add(self, container: str, field: int, plugin: str) -> None:
        """Record `plugin` as one more owner of a field to which several plugins may add entries."""
        owners = self.message.owners[container]
        before = owners.simple.get(field, "")
        owners.simple[field] = f"{before},{plugin}" if before else plugin

    def snapshot(self, container: str) -> api.FieldOwners:
        """Return a copy of the owners of a container, for `restore`."""
        return copy(self.message.owners[container])

    def restore(self, container: str, owners: api.FieldOwners) -> None:
        """Restore the owners of a container to `owners`, which `snapshot` has returned. This drops
        all claims since then."""
        self.message.owners[container].CopyFrom(owners)
