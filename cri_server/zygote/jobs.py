"""Jobs of the server: functions that run in a forked child of a zygote.

The zygote preloads this module, so it imports neither gRPC nor asyncio.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from pyrunc.abi.clone import CLONE_NEWNET
from pyrunc.errors import PeerError
from pyrunc.kernel.fd import closing_fd
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
# A server in a pod may listen in one family only. containerd tries both in turn, too: Go's parallel
# attempts would leave the thread that is in the pod's network namespace.
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class DialRequest(Record):
    """The request of `dial`. `port`: the TCP port to connect to. `pid`: a process in the network
    namespace to connect in, 0 for the host's namespace. `start_time`: when this process started, in
    clock ticks since boot; with it `dial` detects a reused pid."""

    port: int
    pid: int = 0
    start_time: int = 0


class CompileAppArmorRequest(Record):
    """The request of `compile_apparmor`. `parser`: the path of apparmor_parser."""

    parser: AbsolutePath


class FeaturesRequest(Record):
    """The request of `features`. `command`: the path and the arguments of the other OCI runtime."""

    command: Sequence[str]


def dial(arguments: Message, fds: list[int]) -> list[int]:
    """Connect to a TCP port on the loopback interface of a network namespace. Return a list of one
    descriptor, the connected socket. `arguments`: the fields of a DialRequest.

    Raises PeerError if neither 127.0.0.1 nor ::1 accepts the connection, or if the process `pid` of
    the request has ended, even if the pid was reused.
    """
    request = DialRequest.of(arguments)
    if request.pid:
        _join_network(request.pid, request.start_time)
    reasons = []
    for family, address in LOOPBACK:
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(DIAL_TIMEOUT_S)
        try:
            connection.connect((address, request.port))
        except OSError as error:
            connection.close()
            reasons.append(f"{address}: {error.strerror or error}")
            continue
        connection.setblocking(False)
        return [connection.detach()]
    raise PeerError(", ".join(reasons))


def _join_network(pid: int, start_time: int) -> None:
    """Join the network namespace of a process. Raises PeerError if the process has ended."""
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PeerError("the pod has ended") from None
    with closing_fd(namespace):
        # Checked after the open: the descriptor now refers to this namespace even if the pid is
        # reused.
        if alive_since(pid) != start_time:
            raise PeerError("the pod has ended")
        setns(namespace, CLONE_NEWNET)


def compile_apparmor(arguments: Message, fds: list[int]) -> None:
    """Execute apparmor_parser, which compiles the policy on stdin and loads it into the kernel in
    place of an earlier policy. The parser's cache is not used. `arguments`: the fields of a
    CompileAppArmorRequest."""
    parser = CompileAppArmorRequest.of(arguments).parser
    os.execv(parser, [parser, "--replace", "--skip-cache"])


def features(arguments: Message, fds: list[int]) -> None:
    """Execute another OCI runtime's `features` command, which prints JSON to stdout. `arguments`:
    the fields of a FeaturesRequest."""
    command = list(FeaturesRequest.of(arguments).command)
    os.execv(command[0], command)
