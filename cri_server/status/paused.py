"""Whether a container is paused: a fact of its cgroup's freezer, which CRI's states do not know."""

from __future__ import annotations

from cri_server.spec import groups
from cri_server.store.model import Container


def is_paused(container: Container) -> bool:
    """Whether it runs and its group was told to freeze; one read of a kernel file."""
    return container.running and groups.place(container.cgroups_path, container.id).frozen()
