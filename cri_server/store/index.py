"""Finds the sandboxes and containers in memory by id, unique id prefix, name or filter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from cri_server.store.model import Container, Sandbox
from pyrunc.errors import NotFound

Object = TypeVar("Object", Sandbox, Container)


class ObjectTable(Generic[Object]):
    """The sandboxes, or the containers, in memory. Finds an object by id, unique prefix of an id,
    or name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._by_id: dict[str, Object] = {}
        self._by_name: dict[tuple[object, ...], str] = {}

    def __iter__(self) -> Iterator[Object]:
        # A copy: callers await in their loops, and other calls add and remove objects meanwhile.
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, item: Object) -> None:
        """Add an object; later calls find it by its id and its name."""
        self._by_id[item.id] = item
        self._by_name[item.name] = item.id

    def remove(self, item: Object) -> None:
        """Remove an object and free its name; does nothing for an unknown object."""
        self._by_id.pop(item.id, None)
        # A second call must not free the name of a later object.
        if self._by_name.get(item.name) == item.id:
            del self._by_name[item.name]

    def find(self, reference: str) -> Object | None:
        """Return the object whose id is `reference`, or else the only object whose id begins with
        `reference`; None if there is no such object, or if `reference` is empty."""
        exact = self._by_id.get(reference)
        # Ids have 64 characters, so a longer text cannot be a prefix, and no search is needed.
        if exact is not None or not reference or len(reference) >= 64:
            return exact
        matches = [item for key, item in self._by_id.items() if key.startswith(reference)]
        return matches[0] if len(matches) == 1 else None

    def get(self, reference: str) -> Object:
        """Return the object whose id is `reference`, or else the only object whose id begins with
        `reference`. Raises NotFound."""
        item = self.find(reference)
        if item is None:
            raise NotFound(f"no such {self._kind}: {reference[:80]!r}")
        return item

    def find_by_name(self, name: tuple[object, ...]) -> Object | None:
        """Return the object with this name; None if there is none."""
        key = self._by_name.get(name)
        return self._by_id.get(key) if key else None


class StoreIndex:
    """The index of all sandboxes and containers."""

    def __init__(self) -> None:
        self.sandboxes: ObjectTable[Sandbox] = ObjectTable("sandbox")
        self.containers: ObjectTable[Container] = ObjectTable("container")

    def containers_of(self, sandbox: Sandbox) -> list[Container]:
        """Return the sandbox's containers, newest last."""
        return sorted(
            (c for c in self.containers if c.sandbox_id == sandbox.id),
            key=lambda c: c.created_at_ns,
        )

    def users_of(self, image_id: str) -> list[str]:
        """Return the ids of the containers that were created from the image, or that mount it."""
        return [
            c.id for c in self.containers if image_id in (c.image_id, *c.mounted_images.values())
        ]

    def select_sandboxes(
        self,
        *,
        reference: str = "",
        state: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Sandbox]:
        """Return the sandboxes that match all given filters. `reference`: an id or unique prefix of
        an id."""
        return [
            s
            for s in _candidates(self.sandboxes, reference)
            if (state is None or s.state == state)
            and (not labels or has_labels(s.config.labels, labels))
        ]

    def select_containers(
        self,
        *,
        reference: str = "",
        state: int | None = None,
        sandbox: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> list[Container]:
        """Return the containers that match all given filters. `reference`: the container's id or a
        unique prefix of this id; `sandbox`: the sandbox's id or a unique prefix of this id."""
        owner = self.sandboxes.find(sandbox) if sandbox else None
        if sandbox and owner is None:
            return []
        return [
            c
            for c in _candidates(self.containers, reference)
            if (state is None or c.state == state)
            and (owner is None or c.sandbox_id == owner.id)
            and (not labels or has_labels(c.config.labels, labels))
        ]


def _candidates(table: ObjectTable[Object], reference: str) -> Iterable[Object]:
    if not reference:
        return table
    item = table.find(reference)
    return [item] if item is not None else []


def has_labels(labels: Mapping[str, str], required: Mapping[str, str]) -> bool:
    """Return whether `labels` has every key of `required` with the same value."""
    return all(key in labels and labels[key] == value for key, value in required.items())
