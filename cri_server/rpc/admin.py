"""A service of our own beside CRI, for our own command line: what CRI has no call for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cri_server.rpc import private
from cri_server.rpc.methods import Method, Table
from cri_server.services import Services
from pyrunc.errors import InvalidArgument


class Admin:
    """The calls."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def load_image(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"path": absolute, "name": reference or missing} -> {"images": [{"id", "repo_tags"}]}."""
        path, name = request.get("path"), request.get("name")
        if not isinstance(path, str) or not path.startswith("/"):
            raise InvalidArgument("path must be an absolute path")
        if name is not None and not isinstance(name, str):
            raise InvalidArgument("name must be a string")
        images = await self._services.images.load(Path(path), name)
        return {"images": [{"id": i.id, "repo_tags": i.repo_tags} for i in images]}

    def table(self) -> Table:
        """What the gRPC server takes."""
        call = Method(private.LOAD_IMAGE, private.decode, self.load_image, private.encode)
        return {private.path(private.LOAD_IMAGE).encode(): call}
