"""A pod's network namespace during a request. The process enters the namespace once to open
sockets, and then uses the sockets from outside.

A socket stays in the namespace in which it was opened. Plugins of one request share one
`PodNamespace` (`shared_pod`), so that they enter the namespace once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from cni_plugins.net import netns
from cni_plugins.net.netlink import NetlinkRequest, NetlinkSocket
from cni_plugins.net.rtnetlink import IFF_UP, open_route_socket, set_link

_LOOPBACK = 1  # the index of `lo` in every network namespace
_shared: dict[str, PodNamespace] = {}


class PodNamespace:
    """A pod's network namespace: its descriptor `fd`, and the sockets opened in it. `close` closes
    the descriptor and the sockets."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._route: NetlinkSocket | None = None
        self.pending: list[NetlinkRequest] = []
        """The queued requests, which `send_pending` sends."""
        self.advertiser: socket.socket | None = None
        """The socket for neighbour advertisements (cni_plugins.net.neighbours); None until a plugin
        opens it."""

    @property
    def route(self) -> NetlinkSocket:
        """Return a route netlink socket in the pod's namespace, opened on first use."""
        if self._route is None:
            with self.entered():
                pass
        assert self._route is not None
        return self._route

    @contextlib.contextmanager
    def entered(self) -> Iterator[NetlinkSocket]:
        """Run the `with` block in the pod's namespace; yields a route netlink socket in it."""
        with netns.entered(self.fd):
            if self._route is None:
                self._route = open_route_socket()
            yield self._route

    def bring_loopback_up(self) -> None:
        """Queue the request that sets `lo` up. `send_pending` sends all queued requests in one
        batch."""
        self.pending.append(set_link(index=_LOOPBACK, flags=IFF_UP, change=IFF_UP))

    def send_pending(self) -> None:
        """Send the queued requests in one batch. Raises KernelError."""
        if self.pending:
            requests, self.pending = self.pending, []
            self.route.call(*requests)

    def close(self) -> None:
        for each in (self._route, self.advertiser):
            if each is not None:
                each.close()
        os.close(self.fd)


@contextlib.contextmanager
def open_pod(path: str) -> Iterator[PodNamespace]:
    """Open the network namespace at `path` for the `with` block, and yield it. In a `with` block of
    `shared_pod(path)`, yield the `PodNamespace` of that block instead. Raises CniError
    UNKNOWN_CONTAINER if there is no namespace at `path`."""
    # Otherwise each plugin of a chain would open and enter the namespace, and open a socket in it.
    if path in _shared:
        yield _shared[path]
        return
    pod = PodNamespace(netns.open_netns(path))
    try:
        yield pod
    finally:
        pod.close()


@contextlib.contextmanager
def shared_pod(path: str) -> Iterator[PodNamespace]:
    """Open the network namespace at `path` for the `with` block, and yield it. Meanwhile
    `open_pod(path)` yields the same `PodNamespace`. Raises CniError UNKNOWN_CONTAINER if there is
    no namespace at `path`."""
    with open_pod(path) as pod:
        _shared[path] = pod
        try:
            yield pod
        finally:
            del _shared[path]
