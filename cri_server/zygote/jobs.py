"""Errands of the server: functions that run in a forked child of the zygote, never in the server
itself.

This module is preloaded by the zygote, so it imports neither gRPC nor asyncio.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.errors import PeerError
from pyrunc.kernel.namespace import setns
from pyrunc.kernel.process import alive_since
from pyrunc.records import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyrunc.ipc import Message
    from pyrunc.records import AbsolutePath

DIAL = "cri_server.zygote.jobs:dial"
DIAL_TIMEOUT_S = 8.0
COMPILE_APPARMOR = "cri_server.zygote.jobs:compile_apparmor"
FEATURES = "cri_server.zygote.jobs:features"
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class DialRequest(Record):
    """Of `dial`. `pid`: a process that began at `start_time`; 0: the host's network is meant."""

    port: int
    pid: int = 0
    start_time: int = 0


class CompileAppArmorRequest(Record):
    """Of `compile_apparmor`. `parser`: the program's path."""

    parser: AbsolutePath


class FeaturesRequest(Record):
    """Of `features`: a path and arguments."""

    command: Sequence[str]


def dial(arguments: Message, fds: list[int]) -> list[int]:
    """A TCP socket to the port of a `Dial` on the loopback of the process's network namespace.
    Raises PeerError."""
    asked = DialRequest.of(arguments)
    pid, port = asked.pid, asked.port
    if pid:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        if alive_since(pid) != asked.start_time:
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


def compile_apparmor(arguments: Message, fds: list[int]) -> None:
    """Become the parser of a `Parse`, which compiles the policy on stdin and replaces it in the
    kernel, past its cache."""
    parser = CompileAppArmorRequest.of(arguments).parser
    os.execv(parser, [parser, "--replace", "--skip-cache"])


def features(arguments: Message, fds: list[int]) -> None:
    """Become the command of a `Command`, an OCI runtime that tells what it can do."""
    command = list(FeaturesRequest.of(arguments).command)
    os.execv(command[0], command)
