"""Tests the handshake with a plugin over a socket pair, and plugins that are late or break the
protocol."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cri_server.api import nri_pb2 as api
from cri_server.config.model import NriConfig
from cri_server.nri import framing
from cri_server.nri.plugin import ALL_EVENTS, Plugin
from pyrunc.errors import PeerError
from tests.support.nri import Refused, TestPlugin

Connect = Callable[..., Awaitable[tuple[Plugin, TestPlugin]]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a function that makes the server's `Plugin` and the plugin at the other end of its
    connection."""
    opened: list[tuple[Plugin, TestPlugin]] = []

    async def update(
        plugin: Plugin, request: api.UpdateContainersRequest
    ) -> list[api.ContainerUpdate]:
        return list(request.update)

    async def make(
        timeout_s: float = 30.0, request_timeout_s: float = 0.0, **options: Any
    ) -> tuple[Plugin, TestPlugin]:
        ours, theirs = socket.socketpair()
        settings = NriConfig(
            registration_timeout_s=timeout_s, request_timeout_s=request_timeout_s or timeout_s
        )
        plugin = Plugin(settings, update, lambda plugin: None)
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: plugin.connection, ours)
        other = TestPlugin(theirs, **options)
        opened.append((plugin, other))
        other.start()
        return plugin, other

    yield make
    for plugin, other in opened:
        plugin.close()
        await asyncio.to_thread(other.close)


async def test_a_plugin_is_registered_and_configured(connect: Connect) -> None:
    plugin, other = await connect(name="some-name", index="42")
    await plugin.register()
    assert (plugin.name, plugin.events) == ("42-some-name", ALL_EVENTS)
    assert other.config is not None and other.config.registration_timeout == 30_000
    failed = await asyncio.to_thread(other.update, api.ContainerUpdate(container_id="x"))
    assert [update.container_id for update in failed.failed] == ["x"]


async def test_a_silent_plugin_is_dropped(connect: Connect) -> None:
    plugin, other = await connect(timeout_s=0.05, register=False)
    with pytest.raises(PeerError, match="registration timed out"):
        await plugin.register()
    await asyncio.to_thread(other.wait, lambda: other.closed)


async def test_a_plugin_that_disconnects_before_its_registration_is_an_error(
    connect: Connect,
) -> None:
    plugin, other = await connect(register=False)
    other.hang_up()
    with pytest.raises(PeerError, match="ended before it registered"):
        await plugin.register()


async def test_unknown_events_are_refused(connect: Connect) -> None:
    plugin, _ = await connect(events=1 << 20)
    with pytest.raises(PeerError, match="unknown events: 0x100000"):
        await plugin.register()
    assert not plugin.open


async def test_updates_before_the_configuration_are_refused(connect: Connect) -> None:
    plugin, other = await connect(register=False)
    with pytest.raises(Refused, match="not configured yet"):
        await asyncio.to_thread(other.update)
    assert plugin.open


async def test_a_plugin_that_times_out_is_dropped_and_the_request_continues(
    connect: Connect,
) -> None:
    release = threading.Event()

    def wait(request: Any) -> None:
        release.wait(60)

    plugin, other = await connect(timeout_s=2.0, handlers={"StartContainer": wait})
    await plugin.register()
    request = api.StartContainerRequest(pod=api.PodSandbox(id="p"))
    try:
        assert await plugin.request(api.START_CONTAINER, request) is None
    finally:
        release.set()
    assert not plugin.open
    assert await plugin.request(api.START_CONTAINER, request) is None
    await asyncio.to_thread(other.wait, lambda: other.closed)


async def test_an_error_of_a_plugin_fails_the_request(connect: Connect) -> None:
    def refuse(request: Any) -> None:
        raise Refused("no")

    plugin, _ = await connect(handlers={"CreateContainer": refuse})
    await plugin.register()
    with pytest.raises(PeerError, match=r"^NRI plugin 00-test: CreateContainer: no$"):
        await plugin.request(api.CREATE_CONTAINER, api.CreateContainerRequest())
    assert plugin.open


async def test_a_synchronization_that_is_too_large_comes_in_parts(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "MESSAGE_LIMIT_BYTES", 20_000)
    plugin, other = await connect()
    await plugin.register()
    pods = [api.PodSandbox(id=f"{n:064}") for n in range(400)]
    containers = [api.Container(id=f"{n:064}") for n in range(300)]
    await plugin.synchronize(pods, containers)
    assert other.pods == pods and other.containers == containers


async def test_a_plugin_without_support_for_parts_is_dropped(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "MESSAGE_LIMIT_BYTES", 20_000)
    plugin, _ = await connect(handlers={"Synchronize": lambda _: api.SynchronizeResponse()})
    await plugin.register()
    with pytest.raises(PeerError, match="in several messages"):
        await plugin.synchronize([api.PodSandbox(id=f"{n:064}") for n in range(400)], [])
    assert not plugin.open


async def test_a_synchronization_may_take_longer_than_an_event(connect: Connect) -> None:
    release = threading.Event()

    def wait(request: Any) -> None:
        release.wait(60)

    # critest's NRI specs delay a synchronization by two seconds, the default timeout of an event.
    plugin, other = await connect(request_timeout_s=0.05, handlers={"Synchronize": wait})
    await plugin.register()
    synchronizing = asyncio.create_task(plugin.synchronize([], []))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(synchronizing), 0.2)
    release.set()
    await synchronizing
    await asyncio.to_thread(other.wait, lambda: other.synchronized)
