"""A pod's network namespace during a request: opened once, entered once, and spoken to through the
sockets made there.

A socket belongs to the namespace that it was made in, whoever uses it from where. Plugins of one
request get the same `Pod` (`sharing`), so that a chain of ours visits the namespace a single time.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from cni_plugins.net import netns
from cni_plugins.net.netlink import NetlinkSocket, Request
from cni_plugins.net.rtnetlink import IFF_UP, open_route_socket, set_link

_LOOPBACK = 1  # the index of `lo` in every network namespace
_shared: dict[str, Pod] = {}


class Pod:
    """The namespace of descriptor `fd`; close it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._route: NetlinkSocket | None = None
        self.pending: list[Request] = []
        """What is to be sent with the next requests."""
        self.advertiser: socket.socket | None = None
        """Sends neighbour advertisements, where somebody has put one here
        (cni_plugins.net.neighbours)."""

    @property
    def route(self) -> NetlinkSocket:
        """A route socket in it."""
        if self._route is None:
            with self.inside():
                pass
        assert self._route is not None
        return self._route

    @contextlib.contextmanager
    def inside(self) -> Iterator[NetlinkSocket]:
        """Be in it for a block, with its route socket."""
        with netns.inside(self.fd):
            if self._route is None:
                self._route = open_route_socket()
            yield self._route

    def bring_loopback_up(self) -> None:
        """Set `lo` up with the next requests, or at the latest with `settle`."""
        self.pending.append(set_link(index=_LOOPBACK, flags=IFF_UP, change=IFF_UP))

    def settle(self) -> None:
        """Send what is pending. Raises KernelError."""
        if self.pending:
            requests, self.pending = self.pending, []
            self.route.call(*requests)

    def close(self) -> None:
        for made in (self._route, self.advertiser):
            if made is not None:
                made.close()
        os.close(self.fd)


@contextlib.contextmanager
def opened(path: str) -> Iterator[Pod]:
    """The namespace at `path` for a block. Raises CniError 3 where there is none."""
    if path in _shared:
        yield _shared[path]
        return
    pod = Pod(netns.open_netns(path))
    try:
        yield pod
    finally:
        pod.close()


@contextlib.contextmanager
def sharing(path: str) -> Iterator[Pod]:
    """`opened`, and whoever opens the same path in the block gets this one."""
    with opened(path) as pod:
        _shared[path] = pod
        try:
            yield pod
        finally:
            del _shared[path]
