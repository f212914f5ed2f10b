"""Errands of the server: functions that run in a forked child of the zygote, never in the server itself.

This module is preloaded by the zygote, so it imports neither gRPC nor asyncio.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.errors import PeerError
from pyrunc.kernel.namespace import setns
from pyrunc.kernel.process import alive_since

DIAL = "cri_server.errands:dial"
DIAL_TIMEOUT_S = 8.0
COMPILE_APPARMOR = "cri_server.errands:compile_apparmor"
FEATURES = "cri_server.errands:features"
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def dial(arguments: dict[str, Any], fds: list[int]) -> list[int]:
    """A TCP socket to `port` on the loopback of the network namespace of `pid` (0: ours), a process that began at
    `start_time`. Raises PeerError."""
    pid, port = int(arguments["pid"]), int(arguments["port"])
    if pid:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        if alive_since(pid) != int(arguments["start_time"]):
            raise PeerError(f"port {port}: the pod is gone")  # another process may have its pid
        setns(namespace, CLONE_NEWNET)
        os.close(namespace)
    reasons = []
    for family, address in LOOPBACK:
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(DIAL_TIMEOUT_S)
        try:
            connection.connect((address, port))
        except OSError as error:
            connection.close()
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        connection.setblocking(False)
        return [connection.detach()]
    raise PeerError(f"port {port}: {', '.join(reasons)}")


def compile_apparmor(arguments: dict[str, Any], fds: list[int]) -> None:
    """Become `parser` (a path), which compiles the policy on stdin and replaces it in the kernel, past its cache."""
    parser = str(arguments["parser"])
    os.execv(parser, [parser, "--replace", "--skip-cache"])


def features(arguments: dict[str, Any], fds: list[int]) -> None:
    """Become `command`, an OCI runtime that tells what it can do."""
    command = [str(word) for word in arguments["command"]]
    os.execv(command[0], command)
