"""Tells the service manager when the server is ready, when it stops, and that its event loop still
runs (sd_notify(3), sd_watchdog_enabled(3)).

A hanging event loop sends no WATCHDOG=1. systemd then restarts the server, which recovers all pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping

from cri_server.operations.tasks import background

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[None]:
    """Send READY=1 on entry to the `with` block, WATCHDOG=1 twice per watchdog timeout during the
    block, and STOPPING=1 at its end."""
    send("READY=1")
    interval_s = watchdog_interval_s(os.environ)
    try:
        if interval_s:
            async with background(_send_alive(interval_s), "watchdog"):
                yield
        else:
            yield
    finally:
        send("STOPPING=1")


def watchdog_interval_s(environment: Mapping[str, str]) -> float:
    """Return the interval of WATCHDOG=1 in seconds, which is half of the service manager's timeout;
    0 if there is no watchdog for this process."""
    try:
        allowed_us = int(environment.get("WATCHDOG_USEC", ""))
        watched = int(environment.get("WATCHDOG_PID", os.getpid()))
    except ValueError:
        return 0.0
    # sd_watchdog_enabled(3) recommends half of the timeout.
    return allowed_us / 2e6 if allowed_us > 0 and watched == os.getpid() else 0.0


async def _send_alive(interval_s: float) -> None:
    while True:
        send("WATCHDOG=1")
        await asyncio.sleep(interval_s)


def send(message: str) -> None:
    """Send `message` to the service manager. Does nothing if NOTIFY_SOCKET is not set."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            # `@` stands for an abstract socket, whose name begins with NUL (unix(7)).
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.send(message.encode())
        except OSError as error:
            log.warning("cannot notify systemd (NOTIFY_SOCKET): %s", error.strerror)
