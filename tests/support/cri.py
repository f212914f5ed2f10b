"""A CRI client for tests: both services on one channel."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import grpc


class Client:
    """`runtime` and `image` are the generated stubs."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()


def connect(socket: Path | str) -> Client:
    """Connect to a server's unix socket."""
    return Client(socket)
