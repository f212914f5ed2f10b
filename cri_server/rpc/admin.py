"""A service of our own beside CRI, for our own command line: what CRI has no call for. JSON objects over gRPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc

from cri_server.rpc.codes import answers
from cri_server.services import Services
from pyrunc.errors import InvalidArgument

SERVICE = "pyrunc.v1.Admin"
LOAD_IMAGE = "LoadImage"


def encode(value: dict[str, Any]) -> bytes:
    """A message."""
    return json.dumps(value).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message's object. Raises ValueError."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


class Admin:
    """The calls."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @answers
    async def load_image(self, request: dict[str, Any], context: Any) -> dict[str, Any]:
        """{"path": absolute, "name": reference or missing} -> {"images": [{"id", "repo_tags"}]}."""
        path, name = request.get("path"), request.get("name")
        if not isinstance(path, str) or not path.startswith("/"):
            raise InvalidArgument("path must be an absolute path")
        if name is not None and not isinstance(name, str):
            raise InvalidArgument("name must be a string")
        images = await self._services.images.load(Path(path), name)
        return {"images": [{"id": i.id, "repo_tags": i.repo_tags} for i in images]}

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What the gRPC server takes."""
        method = grpc.unary_unary_rpc_method_handler(
            self.load_image, request_deserializer=decode, response_serializer=encode
        )
        return grpc.method_handlers_generic_handler(SERVICE, {LOAD_IMAGE: method})
