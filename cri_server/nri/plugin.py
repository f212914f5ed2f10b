"""A plugin: its registration, and requests to it.

A plugin that disconnects, times out or breaks the protocol is dropped, and the request continues
without it. A plugin's error fails the request, as in the Go module.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.config.model import NriConfig
from cri_server.nri import framing
from cri_server.nri.connection import Closed, PluginCallFailed, PluginConnection, Reply
from cri_server.nri.launch import PluginProcess
from cri_server.rpc.codes import Code
from pyrunc import __version__
from pyrunc.errors import Error, PeerError

log = logging.getLogger(__name__)

NRI_VERSION = "v0.12.3"  # of the Go module with the same interface
RUNTIME_NAME = "pyrunc"
ALL_EVENTS = (1 << (api.LAST - 1)) - 1
INDEX, NAME = re.compile(r"[0-9]{2}"), re.compile(r"[A-Za-z0-9_.+-]{1,200}")
OBJECTS_PER_MESSAGE = 256  # of a Synchronize that exceeds one message

METHODS = {
    number: name.title().replace("_", "")  # RUN_POD_SANDBOX is sent as RunPodSandbox
    for name, number in api.Event.items()
    if name not in ("UNKNOWN", "LAST")
}
# Events that plugins of NRI before v0.12 get by the method StateChange.
STATE_CHANGES = {
    event
    for event, method in METHODS.items()
    if method.startswith(("Post", "Run", "Start", "Remove")) or method == "StopPodSandbox"
}


FAILURES = (TimeoutError, Closed, PluginCallFailed, framing.TooLarge)
"""The exceptions that a call to a plugin can raise."""


class Plugin:
    """A plugin and its connection. `settings`: how long the server waits for the plugin.

    - `process`: the process of a plugin that the server has started; None for an external plugin,
      which has connected itself.
    - `config`: the configuration of a plugin that the server has started; empty for an external
      one.
    """

    def __init__(
        self,
        settings: NriConfig,
        update: Callable[
            [Plugin, api.UpdateContainersRequest], Awaitable[Sequence[api.ContainerUpdate]]
        ],
        on_close: Callable[[Plugin], None],
    ) -> None:
        self.index, self.base_name, self.events = "", "", 0
        self.process: PluginProcess | None = None
        self.config = ""
        self.connection = PluginConnection(self._serve, self._on_connection_close)
        self._settings, self._update, self._on_close = settings, update, on_close
        self._registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._old: set[int] = set()  # events that it gets by StateChange

    @property
    def name(self) -> str:
        """`INDEX-NAME`, for messages."""
        return f"{self.index}-{self.base_name}" if self.base_name else "(unregistered)"

    @property
    def open(self) -> bool:
        return self.connection.open

    def is_subscribed(self, event: int) -> bool:
        return self.open and bool(self.events & 1 << (event - 1))

    def close(self) -> None:
        """Close the connection. If the server has started the plugin, also end its process."""
        self.connection.close()

    # -- the handshake

    async def register(self) -> None:
        """Wait for the plugin's registration, then configure the plugin. On failure close the
        plugin and raise PeerError."""
        try:
            async with asyncio.timeout(self._settings.registration_timeout_s):
                await asyncio.shield(self._registered)
            await self._configure()
        except (*FAILURES, PeerError) as error:
            raise self._drop(error, "registration timed out") from None

    async def _configure(self) -> None:
        request = api.ConfigureRequest(
            config=self.config,
            runtime_name=RUNTIME_NAME,
            runtime_version=__version__,
            registration_timeout=int(self._settings.registration_timeout_s * 1e3),
            request_timeout=int(self._settings.request_timeout_s * 1e3),
            NRI_version=NRI_VERSION,
        )
        response = await self._join("Configure", request, api.ConfigureResponse)
        if response.events & ~ALL_EVENTS:
            raise PeerError(f"the plugin subscribes to unknown events: {response.events:#x}")
        # An empty mask subscribes to all events, as in the Go module.
        self.events = response.events or ALL_EVENTS

    async def synchronize(
        self, pods: list[api.PodSandbox], containers: list[api.Container]
    ) -> api.SynchronizeResponse:
        """Send all pods and containers to the plugin, in several messages if needed; return its
        response. On failure close the plugin and raise PeerError."""
        try:
            try:
                request = api.SynchronizeRequest(pods=pods, containers=containers)
                return await self._join("Synchronize", request, api.SynchronizeResponse)
            except framing.TooLarge:
                return await self._synchronize_in_parts(pods, containers)
        except FAILURES as error:
            raise self._drop(error, "no answer in time", "Synchronize: ") from None

    def _drop(self, error: Exception, timeout: str, call: str = "") -> PeerError:
        """Close the plugin after its registration or synchronization has failed, and return the
        PeerError to raise. `timeout`: the message if `error` is a TimeoutError; `call`: a prefix of
        the message."""
        self.close()
        why = timeout if isinstance(error, TimeoutError) else str(error)
        return PeerError(f"NRI plugin {self.name}: {call}{why}")

    async def _synchronize_in_parts(
        self, pods: list[api.PodSandbox], containers: list[api.Container]
    ) -> api.SynchronizeResponse:
        parts = [
            api.SynchronizeRequest(pods=pods[i : i + OBJECTS_PER_MESSAGE]) for i in _starts(pods)
        ]
        parts += [
            api.SynchronizeRequest(containers=containers[i : i + OBJECTS_PER_MESSAGE])
            for i in _starts(containers)
        ]
        for part in parts[:-1]:
            part.more = True
            response = await self._join("Synchronize", part, api.SynchronizeResponse)
            # A plugin that ignores `more` would take the first part for the whole node, and reply
            # with updates.
            if response.update or not response.more:
                raise PluginCallFailed(
                    Code.UNIMPLEMENTED,
                    "the plugin does not support Synchronize in several messages",
                )
        return await self._join("Synchronize", parts[-1], api.SynchronizeResponse)

    # -- requests

    async def request(self, event: int, request: Any) -> Any | None:
        """Send a request; return the response. Return None if the plugin has not subscribed to
        `event`, or was dropped because it timed out or disconnected.

        Raises PeerError when the plugin answers with an error, or the request is too large to send.
        """
        if not self.is_subscribed(event):
            return None
        method = METHODS[event]  # type: ignore[index]
        reply = getattr(api, f"{method}Response")
        timeout_s = self._settings.request_timeout_s
        try:
            # A plugin of an older API answers UNIMPLEMENTED; it is asked once for each event.
            if event not in self._old:
                try:
                    return await self.connection.call(method, request, reply, timeout_s)
                except PluginCallFailed as error:
                    if error.code != Code.UNIMPLEMENTED or event not in STATE_CHANGES:
                        raise
                    self._old.add(event)
            change = api.StateChangeEvent(event=event, pod=request.pod)  # type: ignore[arg-type]
            if "container" in request.DESCRIPTOR.fields_by_name:
                change.container.CopyFrom(request.container)
            await self.connection.call("StateChange", change, api.Empty, timeout_s)
            return reply()
        except PluginCallFailed as error:
            raise PeerError(f"NRI plugin {self.name}: {method}: {error.message}") from None
        except framing.TooLarge as error:
            raise PeerError(f"NRI plugin {self.name}: {method}: {error}") from None
        except (TimeoutError, Closed) as error:
            why = "timed out" if isinstance(error, TimeoutError) else str(error)
            log.error("NRI plugin %s is disconnected: %s: %s", self.name, method, why)
            self.close()
            return None

    async def _join(self, method: str, request: Any, reply: type[Reply]) -> Reply:
        """Call Configure or Synchronize. The time limit is the registration timeout, by default
        longer than the request timeout: a plugin may be slow to process all pods of the node."""
        timeout_s = self._settings.registration_timeout_s
        return await self.connection.call(method, request, reply, timeout_s)

    # -- calls of the plugin

    async def _serve(self, method: str, payload: bytes) -> bytes:
        if method == "RegisterPlugin":
            self._register(api.RegisterPluginRequest.FromString(payload))
            return b""
        if method == "UpdateContainers":
            if not self.events:
                raise PluginCallFailed(Code.FAILED_PRECONDITION, "the plugin is not configured yet")
            try:
                failed = await self._update(self, api.UpdateContainersRequest.FromString(payload))
            except Error as error:
                raise PluginCallFailed(Code.UNKNOWN, error.message) from None
            return api.UpdateContainersResponse(failed=failed).SerializeToString()
        raise PluginCallFailed(Code.UNIMPLEMENTED, f"no method {method[:80]!r}")

    def _register(self, request: api.RegisterPluginRequest) -> None:
        if self._registered.done():
            raise PluginCallFailed(Code.ALREADY_EXISTS, "the plugin is already registered")
        if self.process is None:  # else both are in the file's name
            if not INDEX.fullmatch(request.plugin_idx) or not NAME.fullmatch(request.plugin_name):
                index, name = request.plugin_idx[:20], request.plugin_name[:80]
                text = f"index {index!r} and name {name!r} are not valid for a plugin"
                self._registered.set_exception(PeerError(text))
                raise PluginCallFailed(Code.INVALID_ARGUMENT, text)
            self.index, self.base_name = request.plugin_idx, request.plugin_name
        self._registered.set_result(None)

    def _on_connection_close(self) -> None:
        if not self._registered.done():
            self._registered.set_exception(Closed("the connection ended before it registered"))
            self._registered.exception()  # else asyncio logs it if no task waits
        if self.process is not None:
            self.process.end_soon()
        self._on_close(self)


def _starts(objects: Sequence[object]) -> range:
    return range(0, len(objects), OBJECTS_PER_MESSAGE)
