"""A CRI client for tests: RuntimeService and ImageService on one channel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from tests.support.processes import wait_until


class Client:
    """A connection to a CRI server; `runtime` and `image` are the stubs of its services."""

    def __init__(self, socket: Path | str) -> None:
        from cri_server.api import api_pb2_grpc

        options = [
            ("grpc.max_receive_message_length", 16 << 20),
            ("grpc.max_send_message_length", 16 << 20),
            # Another channel's refused attempt would keep this one from trying for a second.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(f"unix://{socket}", options=options)
        self.runtime: Any = api_pb2_grpc.RuntimeServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.image: Any = api_pb2_grpc.ImageServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()


def connect(socket: Path | str) -> Client:
    """Return a client of the server at this unix socket."""
    return Client(socket)


def remove_pods(socket: Path | str) -> None:
    """Stop and remove every sandbox with its containers, as an administrator would with crictl."""
    from cri_server.api import api_pb2

    with connect(socket) as client:
        for sandbox in client.runtime.ListPodSandbox(api_pb2.ListPodSandboxRequest()).items:
            client.runtime.StopPodSandbox(
                api_pb2.StopPodSandboxRequest(pod_sandbox_id=sandbox.id), timeout=60
            )
            client.runtime.RemovePodSandbox(
                api_pb2.RemovePodSandboxRequest(pod_sandbox_id=sandbox.id), timeout=60
            )


def remove_pods_beside_others(socket: Path | str, timeout_s: float) -> None:
    """Remove all pods like `remove_pods`, and repeat if a call fails because another client removes
    the same pod."""
    failed: grpc.RpcError | None = None

    def removed() -> bool:
        nonlocal failed
        try:
            remove_pods(socket)
        except grpc.RpcError as error:
            failed = error
            return False
        return True

    if not wait_until(removed, timeout_s, every_s=0.5):
        raise RuntimeError(f"pods are left on {socket}") from failed
