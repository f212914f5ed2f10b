"""Derives a pod's addresses, routes and MAC address, and the bridge's addresses, from an IPAM
plugin's result. Does no I/O."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from ipaddress import ip_interface

from cni_plugins.bridge.settings import BridgeSettings
from cni_plugins.protocol.addresses import ANYWHERE, Address, AddressInNetwork
from cni_plugins.protocol.errors import INVALID_CONFIG, CniError
from cni_plugins.protocol.result import AssignedAddress, Result, Route


@dataclass(frozen=True, slots=True)
class Addressing:
    """The addressing of one attachment.

    - `ips`: the pod's addresses
    - `reported`: the pod's routes as ADD reports them
    - `gateways`: the bridge's addresses
    - `mac`: the MAC address of the pod's interface
    """

    ips: tuple[AssignedAddress, ...]
    reported: tuple[Route, ...]
    gateways: tuple[AddressInNetwork, ...]
    mac: str

    @property
    def routes(self) -> tuple[Route, ...]:
        """Return the routes to install in the pod: the routes of ADD's result. A route without a
        gateway gets the first gateway of its IP version, unless its scope is link."""
        return installed_routes(self.reported, self.ips)

    @property
    def versions(self) -> set[int]:
        return {assigned.address.version for assigned in self.ips}


def derive(answer: Result, settings: BridgeSettings, seed: str) -> Addressing:
    """Derive the addressing of an attachment from an IPAM plugin's result. `seed`: determines the
    MAC address of a pod without an IPv4 address.

    Raises CniError INVALID_CONFIG if the result has addresses but `settings` has
    `container_interface_down`.
    """
    if settings.container_interface_down and answer.ips:
        raise CniError(
            INVALID_CONFIG, "disableContainerInterface cannot be combined with addresses"
        )
    ips = tuple(_with_gateway(assigned, settings) for assigned in answer.ips)
    reported = list(answer.routes)
    if settings.is_default_gateway:
        destinations = {route.destination for route in reported}
        defaults = (
            Route(ANYWHERE[version], gateway) for version, gateway in first_gateways(ips).items()
        )
        reported += [route for route in defaults if route.destination not in destinations]
    return Addressing(
        ips=ips,
        reported=tuple(reported),
        gateways=_bridge_addresses(ips) if settings.is_gateway else (),
        mac=settings.mac or _derived_mac(ips, seed),
    )


def first_gateways(ips: tuple[AssignedAddress, ...]) -> dict[int, Address]:
    """Map each IP version (4, 6) to the first gateway among `ips`."""
    gateways: dict[int, Address] = {}
    for assigned in ips:
        if assigned.gateway is not None:
            gateways.setdefault(assigned.gateway.version, assigned.gateway)
    return gateways


def installed_routes(
    routes: tuple[Route, ...], ips: tuple[AssignedAddress, ...]
) -> tuple[Route, ...]:
    """Return `routes` without duplicates. A route without a gateway gets the first gateway of its
    IP version in `ips`, unless the route's scope is link."""
    gateways = first_gateways(ips)
    return tuple(dict.fromkeys(_with_default_gateway(route, gateways) for route in routes))


def _with_gateway(assigned: AssignedAddress, settings: BridgeSettings) -> AssignedAddress:
    if assigned.gateway is not None or not settings.is_gateway:
        return assigned
    return replace(assigned, gateway=assigned.address.network.network_address + 1)


def _with_default_gateway(route: Route, gateways: dict[int, Address]) -> Route:
    # RT_SCOPE_LINK says that the destination is on the link, so there is no gateway to it.
    if route.gateway is not None or route.number("scope") == 253:
        return route
    return replace(route, gateway=gateways.get(route.destination.version))


def _bridge_addresses(
    ips: tuple[AssignedAddress, ...],
) -> tuple[AddressInNetwork, ...]:
    addresses = (
        ip_interface((assigned.gateway, assigned.address.network.prefixlen))
        for assigned in ips
        if assigned.gateway is not None
    )
    return tuple(dict.fromkeys(addresses))


def _derived_mac(ips: tuple[AssignedAddress, ...], seed: str) -> str:
    """Return a MAC address: 0a:58, followed by the pod's IPv4 address. For a pod without IPv4, a
    hash of `seed` follows. The next pod with this IPv4 address gets the same MAC address, so ARP
    entries stay valid."""
    packed = next((a.address.ip.packed for a in ips if a.address.version == 4), None)
    # 0a:58 is the prefix of the reference plugins (pkg/utils/hwaddr): locally administered,
    # unicast.
    return (b"\x0a\x58" + (packed or hashlib.sha256(seed.encode()).digest()[:4])).hex(":")
