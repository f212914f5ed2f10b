"""Reads the kernel's links, addresses and routes through pyroute2, for CHECK and GC. This module
does not use ADD's netlink codec (`rtnetlink`), so that CHECK can find errors of that codec.

Every function reads the network namespace of the calling process. The first call imports pyroute2,
which takes 150 ms and 23 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_interface as parse_interface
from ipaddress import ip_network as parse_network
from typing import Any

from cni_plugins.protocol.addresses import AddressInNetwork, Network

_UNICAST = 1
_LOCAL_TABLE = 255


@dataclass(frozen=True, slots=True)
class LinkState:
    """A network interface. `master`: the index of its bridge or other master, 0 without one.
    `hairpin`, `isolated`: flags of a bridge's port, None for other interfaces."""

    index: int
    name: str
    kind: str
    mac: str
    mtu: int
    up: bool
    master: int
    alias: str
    promiscuous: bool
    hairpin: bool | None
    isolated: bool | None


@dataclass(frozen=True, slots=True)
class RouteState:
    """A unicast route. `gateway` is empty for an on-link route; `oif` is the index of the outgoing
    link."""

    destination: Network
    gateway: str
    oif: int
    table: int
    priority: int


def links() -> list[LinkState]:
    """Return all links of the current network namespace."""
    with _route() as route:
        return [_link(message) for message in route.get_links()]


def link_named(name: str) -> LinkState | None:
    return next((link for link in links() if link.name == name), None)


def addresses(index: int) -> list[AddressInNetwork]:
    """Return the addresses of the link with this index."""
    with _route() as route:
        return [
            parse_interface(
                # IFA_ADDRESS is the peer's address on a point-to-point link (rtnetlink(7)); IPv6
                # has no IFA_LOCAL.
                f"{message.get('IFA_LOCAL') or message.get('IFA_ADDRESS')}/{message['prefixlen']}"
            )
            for message in route.get_addr(index=index)
        ]


def routes() -> list[RouteState]:
    """Return the unicast IPv4 and IPv6 routes of all routing tables except `local`."""
    unicast_routes = []
    with _route() as route:
        for family, anywhere in ((2, "0.0.0.0"), (10, "::")):
            for message in route.get_routes(family=family):
                # The header has eight bits for the table; RTA_TABLE has the whole number.
                table = message.get("RTA_TABLE") or message["table"]
                if message["type"] != _UNICAST or table == _LOCAL_TABLE:
                    continue
                unicast_routes.append(
                    RouteState(
                        destination=parse_network(
                            f"{message.get('RTA_DST') or anywhere}/{message['dst_len']}"
                        ),
                        gateway=message.get("RTA_GATEWAY") or "",
                        oif=message.get("RTA_OIF") or 0,
                        table=table,
                        priority=message.get("RTA_PRIORITY") or 0,
                    )
                )
    return unicast_routes


def _link(message: Any) -> LinkState:
    info = message.get("IFLA_LINKINFO")
    port = (
        info.get("IFLA_INFO_SLAVE_DATA")
        if info and info.get("IFLA_INFO_SLAVE_KIND") == "bridge"
        else None
    )
    return LinkState(
        index=message["index"],
        name=message.get("IFLA_IFNAME"),
        kind=(info.get("IFLA_INFO_KIND") if info else "") or "",
        mac=message.get("IFLA_ADDRESS") or "",
        mtu=message.get("IFLA_MTU") or 0,
        up=bool(message["flags"] & 1),
        master=message.get("IFLA_MASTER") or 0,
        alias=message.get("IFLA_IFALIAS") or "",
        promiscuous=bool(message["flags"] & 0x100),
        hairpin=bool(port.get("IFLA_BRPORT_MODE")) if port else None,
        isolated=bool(port.get("IFLA_BRPORT_ISOLATED")) if port else None,
    )


@contextmanager
def _route() -> Iterator[Any]:
    from pyroute2 import IPRoute

    with IPRoute() as route:
        yield route
