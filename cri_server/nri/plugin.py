"""One plugin: how it comes to be registered, and what a request to it may lead to.

A plugin that is gone, is late or breaks the protocol is dropped and the request goes on without it;
what it answers with an error is an error of the request (the Go adaptation draws the same line).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cri_server.api import nri_pb2 as api
from cri_server.nri import framing
from cri_server.nri.connection import CallFailed, Closed, Connection, Reply
from cri_server.nri.launch import Launched
from cri_server.rpc.codes import Code
from pyrunc import __version__
from pyrunc.errors import Error, PeerError

log = logging.getLogger(__name__)

NRI_VERSION = "v0.12.3"  # of the Go module whose interface this is
RUNTIME_NAME = "pyrunc"
ALL_EVENTS = (1 << (api.LAST - 1)) - 1
INDEX, NAME = re.compile(r"[0-9]{2}"), re.compile(r"[A-Za-z0-9_.+-]{1,200}")
OBJECTS_AT_ONCE = 256  # of one Synchronize message, where all of them are too many for one

METHODS = {
    api.RUN_POD_SANDBOX: "RunPodSandbox",
    api.STOP_POD_SANDBOX: "StopPodSandbox",
    api.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    api.CREATE_CONTAINER: "CreateContainer",
    api.POST_CREATE_CONTAINER: "PostCreateContainer",
    api.START_CONTAINER: "StartContainer",
    api.POST_START_CONTAINER: "PostStartContainer",
    api.UPDATE_CONTAINER: "UpdateContainer",
    api.POST_UPDATE_CONTAINER: "PostUpdateContainer",
    api.STOP_CONTAINER: "StopContainer",
    api.REMOVE_CONTAINER: "RemoveContainer",
    api.UPDATE_POD_SANDBOX: "UpdatePodSandbox",
    api.POST_UPDATE_POD_SANDBOX: "PostUpdatePodSandbox",
    api.VALIDATE_CONTAINER_ADJUSTMENT: "ValidateContainerAdjustment",
}
# Events for which a plugin of NRI before v0.12 has no method of its own.
STATE_CHANGES = {
    event
    for event, method in METHODS.items()
    if method.startswith(("Post", "Run", "Start", "Remove")) or method == "StopPodSandbox"
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds."""

    registration_s: float
    request_s: float


class Plugin:
    """A connection that says it is a plugin. `launched` and `config` are those of one that we have
    started."""

    def __init__(
        self,
        timeouts: Timeouts,
        update: Callable[
            [Plugin, api.UpdateContainersRequest], Awaitable[Sequence[api.ContainerUpdate]]
        ],
        dropped: Callable[[Plugin], None],
    ) -> None:
        self.index, self.base, self.events = "", "", 0
        self.launched: Launched | None = None
        self.config = ""
        self.connection = Connection(self._serve, self._closed)
        self._timeouts, self._update, self._dropped = timeouts, update, dropped
        self._registered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._old: set[int] = set()  # events that it gets as StateChange

    @property
    def name(self) -> str:
        """`INDEX-NAME`, as it is called in messages."""
        return f"{self.index}-{self.base}" if self.base else "that has not registered"

    @property
    def open(self) -> bool:
        return self.connection.open

    def wants(self, event: int) -> bool:
        return self.open and bool(self.events & 1 << (event - 1))

    def close(self) -> None:
        """Drop it; one that we have started is ended."""
        self.connection.close()

    # -- the handshake

    async def register(self) -> None:
        """Wait until it has said who it is, and configure it. Raises PeerError; it is closed then."""
        try:
            async with asyncio.timeout(self._timeouts.registration_s):
                await asyncio.shield(self._registered)
            await self._configure()
        except (TimeoutError, Closed, CallFailed, framing.TooLarge, PeerError) as error:
            self.close()
            why = "it did not register in time" if isinstance(error, TimeoutError) else str(error)
            raise PeerError(f"NRI plugin {self.name}: {why}") from None

    async def _configure(self) -> None:
        request = api.ConfigureRequest(
            config=self.config,
            runtime_name=RUNTIME_NAME,
            runtime_version=__version__,
            registration_timeout=int(self._timeouts.registration_s * 1e3),
            request_timeout=int(self._timeouts.request_s * 1e3),
            NRI_version=NRI_VERSION,
        )
        response = await self._join("Configure", request, api.ConfigureResponse)
        if response.events & ~ALL_EVENTS:
            raise PeerError(f"it subscribes to unknown events: {response.events:#x}")
        self.events = response.events or ALL_EVENTS

    async def synchronize(
        self, pods: list[api.PodSandbox], containers: list[api.Container]
    ) -> api.SynchronizeResponse:
        """Tell it of all there is, in as many messages as it takes. Raises PeerError; it is closed
        then."""
        try:
            try:
                request = api.SynchronizeRequest(pods=pods, containers=containers)
                return await self._join("Synchronize", request, api.SynchronizeResponse)
            except framing.TooLarge:
                return await self._synchronize_in_parts(pods, containers)
        except (TimeoutError, Closed, CallFailed, framing.TooLarge) as error:
            self.close()
            why = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
            raise PeerError(f"NRI plugin {self.name}: Synchronize: {why}") from None

    async def _synchronize_in_parts(
        self, pods: list[api.PodSandbox], containers: list[api.Container]
    ) -> api.SynchronizeResponse:
        parts = [api.SynchronizeRequest(pods=pods[i : i + OBJECTS_AT_ONCE]) for i in _starts(pods)]
        parts += [
            api.SynchronizeRequest(containers=containers[i : i + OBJECTS_AT_ONCE])
            for i in _starts(containers)
        ]
        for part in parts[:-1]:
            part.more = True
            response = await self._join("Synchronize", part, api.SynchronizeResponse)
            if response.update or not response.more:
                raise CallFailed(
                    Code.UNIMPLEMENTED, "it takes all pods and containers in one message only"
                )
        return await self._join("Synchronize", parts[-1], api.SynchronizeResponse)

    # -- requests

    async def ask(self, event: int, request: Any) -> Any | None:
        """Its answer; None where it does not want to hear of `event`, or was dropped for not
        answering.

        Raises PeerError: it answered with an error.
        """
        if not self.wants(event):
            return None
        method = METHODS[event]  # type: ignore[index]
        reply = getattr(api, f"{method}Response")
        try:
            if event not in self._old:
                try:
                    return await self._call(method, request, reply)
                except CallFailed as error:
                    if error.code != Code.UNIMPLEMENTED or event not in STATE_CHANGES:
                        raise
                    self._old.add(event)
            change = api.StateChangeEvent(event=event, pod=request.pod)  # type: ignore[arg-type]
            if "container" in request.DESCRIPTOR.fields_by_name:
                change.container.CopyFrom(request.container)
            await self._call("StateChange", change, api.Empty)
            return reply()
        except CallFailed as error:
            raise PeerError(f"NRI plugin {self.name}: {method}: {error.message}") from None
        except framing.TooLarge as error:
            raise PeerError(f"NRI plugin {self.name}: {method}: {error}") from None
        except (TimeoutError, Closed) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            log.error("NRI plugin %s is dropped: %s: %s", self.name, method, why)
            self.close()
            return None

    async def _call(self, method: str, request: Any, reply: type[Reply]) -> Reply:
        return await self.connection.call(method, request, reply, self._timeouts.request_s)

    async def _join(self, method: str, request: Any, reply: type[Reply]) -> Reply:
        """A plugin that looks at a whole node for the first time takes longer than for an event."""
        return await self.connection.call(method, request, reply, self._timeouts.registration_s)

    # -- what it calls

    async def _serve(self, method: str, payload: bytes) -> bytes:
        if method == "RegisterPlugin":
            self._register(api.RegisterPluginRequest.FromString(payload))
            return b""
        if method == "UpdateContainers":
            if not self.events:
                raise CallFailed(Code.FAILED_PRECONDITION, "the plugin is not configured yet")
            try:
                failed = await self._update(self, api.UpdateContainersRequest.FromString(payload))
            except Error as error:
                raise CallFailed(Code.UNKNOWN, error.message) from None
            return api.UpdateContainersResponse(failed=failed).SerializeToString()
        raise CallFailed(Code.UNIMPLEMENTED, f"no method {method[:80]!r}")

    def _register(self, request: api.RegisterPluginRequest) -> None:
        if self._registered.done():
            raise CallFailed(Code.ALREADY_EXISTS, "the plugin has registered already")
        if self.launched is None:  # the name of one that we have started is its file's
            if not INDEX.fullmatch(request.plugin_idx) or not NAME.fullmatch(request.plugin_name):
                text = f"index {request.plugin_idx[:20]!r} and name {request.plugin_name[:80]!r} are no plugin's"
                self._registered.set_exception(PeerError(text))
                raise CallFailed(Code.INVALID_ARGUMENT, text)
            self.index, self.base = request.plugin_idx, request.plugin_name
        self._registered.set_result(None)

    def _closed(self) -> None:
        if not self._registered.done():
            self._registered.set_exception(Closed("the connection ended before it registered"))
            self._registered.exception()  # which nobody may be waiting for
        if self.launched is not None:
            self.launched.end_soon()
        self._dropped(self)


def _starts(objects: Sequence[object]) -> range:
    return range(0, len(objects), OBJECTS_AT_ONCE)
