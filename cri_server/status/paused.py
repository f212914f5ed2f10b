"""Reads from its cgroup's freezer whether a container is paused; CRI has no such state."""

from __future__ import annotations

from cri_server.spec import groups
from cri_server.store.model import Container


def is_paused(container: Container) -> bool:
    """Whether the container runs and its cgroup is set to freeze; reads one kernel file."""
    return container.running and groups.place(container.cgroups_path, container.id).frozen()
