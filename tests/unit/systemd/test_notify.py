"""Tests the messages to systemd: ready, watchdog, stopping."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from cri_server.systemd import notify


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> socket.socket:
    """Return the manager's end of NOTIFY_SOCKET."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    request.addfinalizer(listener.close)
    name = f"{tmp_path}/notify" if request.param == "path" else f"@pyrunc-{os.getpid()}"
    listener.bind("\0" + name[1:] if name[0] == "@" else name)
    listener.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    return listener


def received_messages(listener: socket.socket) -> list[str]:
    """Return all datagrams that have arrived so far."""
    datagrams = []
    while True:
        try:
            datagrams.append(listener.recv(4096).decode())
        except BlockingIOError:
            return datagrams


async def test_a_watched_server_sends_watchdog_messages(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    async with notify.supervised():
        messages = received_messages(manager)
        async with asyncio.timeout(30):
            while len(messages) < 4:
                await asyncio.sleep(0.01)
                messages += received_messages(manager)
    first, *alive, last = [*messages, *received_messages(manager)]
    assert (first, set(alive), last) == ("READY=1", {"WATCHDOG=1"}, "STOPPING=1")


async def test_a_loop_that_hangs_says_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    async with notify.supervised():
        await asyncio.sleep(0.05)
        received_messages(manager)
        time.sleep(0.2)
        assert received_messages(manager) == []


async def test_without_a_watchdog_nothing_is_sent(manager: socket.socket) -> None:
    async with notify.supervised():
        await asyncio.sleep(0.05)
    assert received_messages(manager) == ["READY=1", "STOPPING=1"]


def test_the_watchdog_is_on_only_for_the_named_process() -> None:
    assert notify.watchdog_interval_s({}) == 0
    assert notify.watchdog_interval_s({"WATCHDOG_USEC": "60000000"}) == 30
    assert (
        notify.watchdog_interval_s({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getppid())})
        == 0
    )
    assert notify.watchdog_interval_s({"WATCHDOG_USEC": "soon"}) == 0
    assert notify.watchdog_interval_s({"WATCHDOG_USEC": "0"}) == 0


def test_a_manager_that_is_gone_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/absent")
    notify.send("READY=1")
