"""The objects in memory: found by id, unique id prefix, name or filter, without touching the disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from cri_server.store.model import Container, Sandbox
from pyrunc.errors import NotFound

Object = TypeVar("Object", Sandbox, Container)


class Table(Generic[Object]):
    """Objects of one kind, by id."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._by_id: dict[str, Object] = {}
        self._by_name: dict[tuple[object, ...], str] = {}

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, thing: Object) -> None:
        """Make it visible."""
        self._by_id[thing.id] = thing
        self._by_name[thing.name] = thing.id

    def remove(self, thing: Object) -> None:
        """Make it invisible and free its name; fine when it is already."""
        self._by_id.pop(thing.id, None)
        if self._by_name.get(thing.name) == thing.id:
            del self._by_name[thing.name]

    def find(self, reference: str) -> Object | None:
        """By id or unique id prefix; None for unknown, ambiguous and empty ones."""
        exact = self._by_id.get(reference)
        if exact is not None or not reference or len(reference) >= 64:
            return exact
        found = [thing for key, thing in self._by_id.items() if key.startswith(reference)]
        return found[0] if len(found) == 1 else None

    def get(self, reference: str) -> Object:
        """As `find`. Raises NotFound."""
        found = self.find(reference)
        if found is None:
            raise NotFound(f"no such {self._kind}: {reference[:80]!r}")
        return found

    def named(self, name: tuple[object, ...]) -> Object | None:
        """The one that holds this name."""
        key = self._by_name.get(name)
        return self._by_id.get(key) if key else None


class Index:
    """All sandboxes and containers."""

    def __init__(self) -> None:
        self.sandboxes: Table[Sandbox] = Table("sandbox")
        self.containers: Table[Container] = Table("container")

    def containers_of(self, sandbox: Sandbox) -> list[Container]:
        """Newest last."""
        return sorted(
            (c for c in self.containers if c.sandbox_id == sandbox.id),
            key=lambda c: c.created_at_ns,
        )

    def users_of(self, image_id: str) -> list[str]:
        """Ids of the containers that were made from the image or mount it."""
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
        """Those that fit all that is given."""
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
        """Those that fit all that is given."""
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


def _candidates(shelf: Table[Object], reference: str) -> Iterable[Object]:
    if not reference:
        return shelf
    found = shelf.find(reference)
    return [found] if found is not None else []


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether every wanted pair is there, exactly."""
    return all(key in labels and labels[key] == value for key, value in wanted.items())
