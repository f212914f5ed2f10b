"""The front end's connection to a running server: the CRI stubs, and errors as one readable line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from cri_server.rpc import private
from pyrunc.errors import Error, NotFound

TIMEOUT_S = 120.0
MESSAGE_LIMIT_BYTES = 32 << 20


class ServerError(Error):
    """The server refused; the message is its own."""


class Client:
    """The calls that the commands make. Use as a context manager."""

    def __init__(self, address: str) -> None:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
        ]
        self._address = address
        self._channel = grpc.insecure_channel(address, options=options)
        self._runtime = api_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._image = api_pb2_grpc.ImageServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def runtime(self, call: str, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """RuntimeService.`call`. Raises ServerError."""
        return self._call(getattr(self._runtime, call), request, timeout_s)

    def image(self, call: str, request: Any, timeout_s: float | None = TIMEOUT_S) -> Any:
        """ImageService.`call`. Raises ServerError."""
        return self._call(getattr(self._image, call), request, timeout_s)

    def load_image(self, path: str, name: str | None) -> list[dict[str, Any]]:
        """The images of an archive that the server reads: their ids and tags."""
        call = self._channel.unary_unary(
            private.path(private.LOAD_IMAGE),
            request_serializer=private.encode,
            response_deserializer=private.decode,
        )
        found: list[dict[str, Any]] = self._call(call, {"path": path, "name": name}, None)["images"]
        return found

    def _call(self, call: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._worded(error) from None

    def _worded(self, error: Any) -> Error:
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return ServerError(f"no server at {self._address} (start one: pyrunc-cri serve)")
        if error.code() == grpc.StatusCode.NOT_FOUND:
            return NotFound(error.details())
        return ServerError(error.details() or error.code().name)

    # -- what several commands need

    def pods(self, **wanted: Any) -> list[api.PodSandbox]:
        request = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(**wanted))
        return list(self.runtime("ListPodSandbox", request).items)

    def containers(self, **wanted: Any) -> list[api.Container]:
        request = api.ListContainersRequest(filter=api.ContainerFilter(**wanted))
        return list(self.runtime("ListContainers", request).containers)

    def container(self, reference: str) -> api.Container:
        """One container by id, id prefix, NAME, POD/NAME or the name of a pod with a single one. Raises NotFound, ServerError."""
        everything, pods = self.containers(), {p.id: p for p in self.pods()}
        pod, _, name = reference.rpartition("/")
        found = [c for c in everything if not pod and c.id.startswith(reference)] or [
            c
            for c in everything
            if c.metadata.name == name
            and (not pod or (c.pod_sandbox_id in pods and pods[c.pod_sandbox_id].metadata.name == pod))
        ]
        if not found and not pod:
            found = [
                c
                for c in everything
                if c.pod_sandbox_id in pods and pods[c.pod_sandbox_id].metadata.name == reference
            ]
        if len(found) > 1:
            running = [c for c in found if c.state == api.CONTAINER_RUNNING]
            found = running or found
        if len(found) > 1:
            raise ServerError(f"{reference!r} means {len(found)} containers; use POD/NAME or an id")
        if not found:
            raise NotFound(f"no such container: {reference!r}")
        return found[0]

    def pod(self, reference: str) -> api.PodSandbox:
        """One pod by id, id prefix or name. Raises NotFound, ServerError."""
        everything = self.pods()
        found = [p for p in everything if p.id.startswith(reference)] or [
            p for p in everything if p.metadata.name == reference
        ]
        if len(found) > 1:
            raise ServerError(f"{reference!r} means {len(found)} pods; use an id")
        if not found:
            raise NotFound(f"no such pod: {reference!r}")
        return found[0]
