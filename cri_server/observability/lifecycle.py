"""The observer whose methods the server calls at events of pods and containers.

With `[nri] enabled` the observer is `cri_server.nri.service.NriObserver`. Otherwise it is
`LifecycleObserver` itself, whose methods do nothing, and the modules of NRI are not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cri_server.api import api_pb2 as api
    from cri_server.store.model import Container, Sandbox


class LifecycleObserver:
    """An observer that does nothing. A subclass refuses an operation by raising an error that the
    method's docstring names."""

    async def run_pod(self, sandbox: Sandbox) -> None:
        """Called before a pod is listed. PeerError refuses the pod."""

    async def update_pod(
        self,
        sandbox: Sandbox,
        overhead: api.LinuxContainerResources,
        limits: api.LinuxContainerResources,
    ) -> None:
        """Called before a pod's new overhead and limits are stored. PeerError refuses the
        update."""

    async def updated_pod(self, sandbox: Sandbox) -> None:
        """Called when the pod's new overhead and limits are stored."""

    async def stop_pod(self, sandbox: Sandbox) -> None:
        """Called when the pod's containers have ended, while its network still exists."""

    async def remove_pod(self, sandbox: Sandbox) -> None:
        """Called when the pod is removed, or its creation was rolled back."""

    async def create_container(
        self, sandbox: Sandbox, container: Container, spec: dict[str, Any]
    ) -> None:
        """Called before a container's record is written; may change `spec` and the container's
        limits in place.

        Any error refuses the container: Conflict, PeerError, Unavailable, InvalidArgument.
        """

    async def created_container(self, sandbox: Sandbox, container: Container) -> None:
        """Called when the container is listed."""

    async def start_container(self, sandbox: Sandbox, container: Container) -> None:
        """Called before the container's process runs. PeerError refuses the start."""

    async def started_container(self, sandbox: Sandbox, container: Container) -> None:
        """Called when the container's process runs."""

    async def update_container(
        self, container: Container, limits: api.LinuxContainerResources
    ) -> api.LinuxContainerResources:
        """Called before the container's new `limits` are set; returns the limits to set instead.
        The caller must not hold the container's lock. Any error refuses the update: Conflict,
        PeerError, InvalidArgument."""
        return limits

    async def updated_container(self, container: Container) -> None:
        """Called when the new limits are set."""

    async def stop_container(self, container: Container) -> None:
        """Called when the container has ended or will never run."""

    async def remove_container(self, container: Container) -> None:
        """Called when the container is removed, or its creation was rolled back."""

    def container_ended(self, container: Container) -> None:
        """Called in place of `stop_container` by code that cannot wait."""
