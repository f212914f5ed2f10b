"""Reads from a container's cgroup whether the container is paused (frozen). CRI has no such
state."""

from __future__ import annotations

from cri_server.spec import groups
from cri_server.store.model import Container


def is_paused(container: Container) -> bool:
    """Return whether the container runs and its cgroup's freezer is set. Reads one file in
    /sys/fs/cgroup."""
    return container.running and groups.place(container.cgroups_path, container.id).frozen()
