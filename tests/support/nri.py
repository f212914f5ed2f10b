"""An NRI plugin for tests: a thread on a socket, which records the calls that it gets and gives the
answers that a test has set. Its separate implementation of ttrpc's framing checks the server's."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.api import ttrpc_pb2 as ttrpc

PACKAGE = "nri.pkg.api.v1alpha1"
WAIT_S = 30.0
Handler = Callable[[Any], Any]


class Refused(Exception):
    """Raised by a handler to answer with an error, by default UNKNOWN."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class TestPlugin:
    """An NRI plugin, as a context manager. It connects to `where` (a path, or a connected socket)
    and registers as `index`-`name`.

    `handlers`: a function for each method. The function gets the request, and returns the response
    (None: the default response) or raises Refused.
    """

    __test__ = False

    def __init__(
        self,
        where: Path | socket.socket,
        name: str = "test",
        index: str = "00",
        *,
        handlers: Mapping[str, Handler] | None = None,
        events: int = 0,
        register: bool = True,
    ) -> None:
        self.name, self.index, self.events = name, index, events
        self.handlers: dict[str, Handler] = dict(handlers or {})
        self.calls: list[tuple[str, Any]] = []
        self.config: api.ConfigureRequest | None = None
        self.pods: list[api.PodSandbox] = []
        self.containers: list[api.Container] = []
        self._changed = threading.Condition()
        self.synchronized = self.closed = False
        self._replies: dict[int, ttrpc.Response] = {}
        self._stream = -1
        if isinstance(where, Path):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(str(where))
        else:
            self._socket = where
        self._lock = threading.Lock()
        self._streams: dict[int, bytes] = {1: b"", 2: b""}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._register = register
        self.wait_s = WAIT_S

    def __enter__(self) -> TestPlugin:
        self.start()
        self.wait(lambda: self.synchronized or self.closed)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to answer requests, and register, without waiting for the server."""
        self._thread.start()
        if self._register:
            request = api.RegisterPluginRequest(plugin_name=self.name, plugin_idx=self.index)
            self._send_request("RegisterPlugin", request)

    def send_raw(self, data: bytes) -> None:
        """Send bytes that need not be a frame."""
        self._socket.sendall(data)

    def hang_up(self) -> None:
        """Close the connection, like a plugin that ends."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the connection and end the plugin's thread."""
        self.hang_up()
        self._thread.join(WAIT_S)
        self._socket.close()

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds. Raises AssertionError when it does not in time."""
        with self._changed:
            is_true = self._changed.wait_for(condition, self.wait_s)
        assert is_true, f"not within {self.wait_s} s; calls: {self.methods()}"

    def methods(self, identifier: str = "") -> list[str]:
        """Return the names of the calls so far, in order; with `identifier` only those of this pod
        or container."""
        return [
            name for name, request in self.calls if not identifier or identifier in ids(request)
        ]

    def wait_for(self, method: str, identifier: str = "") -> Any:
        """Wait for the first request of the NRI method `method`; return it."""
        self.wait(lambda: method in self.methods(identifier))
        return next(
            r for m, r in self.calls if m == method and (not identifier or identifier in ids(r))
        )

    def update(
        self, *updates: api.ContainerUpdate, evict: str = ""
    ) -> api.UpdateContainersResponse:
        """Send UpdateContainers, a plugin's own request; return the runtime's response. Raises
        Refused."""
        request = api.UpdateContainersRequest(update=updates)
        if evict:
            request.evict.add(container_id=evict, reason="test")
        stream = self._send_request("UpdateContainers", request)
        self.wait(lambda: stream in self._replies or self.closed)
        response = self._replies[stream]
        if response.status.code:
            raise Refused(response.status.message, response.status.code)
        return api.UpdateContainersResponse.FromString(response.payload)

    # -- inside

    def _send_request(self, method: str, request: Any) -> int:
        self._stream += 2
        whole = ttrpc.Request(
            service=f"{PACKAGE}.Runtime", method=method, payload=request.SerializeToString()
        )
        self._send(2, self._stream, 1, whole.SerializeToString())
        return self._stream

    def _send(self, connection: int, stream: int, kind: int, payload: bytes) -> None:
        head = struct.pack(">IIBB", len(payload), stream, kind, 0)
        with self._lock:  # in two frames, because a message may come in many
            self._socket.sendall(struct.pack(">II", connection, len(head)) + head)
            self._socket.sendall(struct.pack(">II", connection, len(payload)) + payload)

    def _read(self) -> None:
        try:
            while True:
                connection, length = struct.unpack(">II", self._exactly(8))
                self._streams[connection] += self._exactly(length)
                self._messages(connection)
        except (OSError, EOFError):
            with self._changed:
                self.closed = True
                self._changed.notify_all()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _messages(self, connection: int) -> None:
        while len(data := self._streams[connection]) >= 10:
            length, stream, kind, _ = struct.unpack_from(">IIBB", data)
            if len(data) < 10 + length:
                return
            self._streams[connection], payload = data[10 + length :], data[10 : 10 + length]
            if kind == 2:
                with self._changed:
                    self._replies[stream] = ttrpc.Response.FromString(payload)
                    self._changed.notify_all()
            else:
                request = ttrpc.Request.FromString(payload)
                threading.Thread(target=self._answer, args=(stream, request), daemon=True).start()

    def _answer(self, stream: int, frame: ttrpc.Request) -> None:
        method = frame.method
        kind = {"StateChange": "StateChangeEvent"}.get(method, f"{method}Request")
        request = getattr(api, kind).FromString(frame.payload)
        with self._changed:
            self._note(method, request)
            self._changed.notify_all()
        try:
            response = ttrpc.Response(payload=self._response(method, request).SerializeToString())
        except Refused as error:
            response = ttrpc.Response(status=ttrpc.Status(code=error.code, message=str(error)))
        try:
            self._send(1, stream, 2, response.SerializeToString())
        except OSError:
            return
        if method == "Synchronize" and not request.more:
            with self._changed:
                self.synchronized = True
                self._changed.notify_all()

    def _note(self, method: str, request: Any) -> None:
        if method == "Configure":
            self.config = request
        elif method == "Synchronize":
            self.pods += request.pods
            self.containers += request.containers
        else:
            self.calls.append((method, request))

    def _response(self, method: str, request: Any) -> Any:
        handler = self.handlers.get(method)
        response = handler(request) if handler is not None else None
        if response is not None:
            return response
        if method == "Configure":
            return api.ConfigureResponse(events=self.events)
        if method == "Synchronize":
            return api.SynchronizeResponse(more=request.more)
        return api.Empty()


def ids(request: Any) -> set[str]:
    """Return the id that a request is about: its container's, else its pod's."""
    container = request.container.id if "container" in request.DESCRIPTOR.fields_by_name else ""
    return {container or request.pod.id}
