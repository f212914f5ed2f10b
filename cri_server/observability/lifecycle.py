"""The interface through which verbs announce events of pods and containers.

With `[nri] enabled` the observer is `cri_server.nri.service.NriObserver`. Otherwise it is
`LifecycleObserver` itself, whose methods do nothing, and the modules of NRI are not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cri_server.api import api_pb2 as api
    from cri_server.store.model import Container, Sandbox


class LifecycleObserver:
    """An observer that does nothing. A subclass may refuse an operation with PeerError in the
    methods that permit it."""

    async def run_pod(self, sandbox: Sandbox) -> None:
        """Announce a pod before it is listed. May raise PeerError, which refuses the pod."""

    async def update_pod(
        self,
        sandbox: Sandbox,
        overhead: api.LinuxContainerResources,
        limits: api.LinuxContainerResources,
    ) -> None:
        """Announce a pod's new overhead and limits before they are stored. May raise PeerError,
        which refuses the update."""

    async def updated_pod(self, sandbox: Sandbox) -> None:
        """Announce that the pod's new overhead and limits are stored."""

    async def stop_pod(self, sandbox: Sandbox) -> None:
        """Announce that the pod's containers have ended, while its network still exists."""

    async def remove_pod(self, sandbox: Sandbox) -> None:
        """Announce that the pod is removed, or was rolled back."""

    async def create_container(
        self, sandbox: Sandbox, container: Container, spec: dict[str, Any]
    ) -> None:
        """Announce a container before its record is written; may change `spec` and the container's
        limits.

        May raise Conflict, PeerError (the container is refused), Unavailable, InvalidArgument.
        """

    async def created_container(self, sandbox: Sandbox, container: Container) -> None:
        """Announce that the container is listed."""

    async def start_container(self, sandbox: Sandbox, container: Container) -> None:
        """Announce a start before the container's process runs. May raise PeerError, which refuses
        the start."""

    async def started_container(self, sandbox: Sandbox, container: Container) -> None:
        """Announce that the container's process runs."""

    async def update_container(
        self, container: Container, limits: api.LinuxContainerResources
    ) -> api.LinuxContainerResources:
        """Announce new limits; return the limits to set in their place. The container's lock must
        be free. May raise Conflict, PeerError."""
        return limits

    async def updated_container(self, container: Container) -> None:
        """Announce that the new limits are set."""

    async def stop_container(self, container: Container) -> None:
        """Announce that the container has ended or will never run."""

    async def remove_container(self, container: Container) -> None:
        """Announce that the container is removed, or was rolled back."""

    def container_ended(self, container: Container) -> None:
        """Announce the end like `stop_container`, for code that cannot wait."""
