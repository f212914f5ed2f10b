"""The plugin portmap: host ports as elements of our nftables maps, one transaction per change.

A port on loopback leads into the pod as well: the client's address is masqueraded and the bridge
may route 127.0.0.0/8 (route_localnet); the table's guard keeps everybody else from using that.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address

from cni_plugins.net import host_rules, netns
from cni_plugins.net.nfnetlink import Element
from cni_plugins.net.rtnetlink import host_socket, route_to
from cni_plugins.portmap import settings as settings_of
from cni_plugins.protocol.call import Call
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, INVALID_CONFIG, NOT_AVAILABLE, CniError
from cni_plugins.protocol.result import AssignedAddress, Result
from cni_plugins.skel import Plugin, serve


@dataclass(frozen=True, slots=True)
class Rules:
    """An attachment's elements, the subnets whose chains they jump into, and the IPv4 addresses
    that loopback may reach."""

    elements: tuple[Element, ...]
    subnets: frozenset[host_rules.Subnet]
    from_loopback: tuple[IPv4Address, ...]


def add(call: Call, config: PluginConfig) -> Result:
    """ADD: opens the ports and hands the result on. Raises CniError, AlreadyExists for a port that
    is taken."""
    previous = _previous(config)
    rules = derive(call, config, previous)
    if rules.elements:
        host_rules.publish(rules.elements, rules.subnets)
        _route_loopback(rules.from_loopback)
        _forget_udp_flows(rules.elements)
    return previous


def delete(call: Call, config: PluginConfig) -> None:
    """DEL: whatever carries the attachment's tag; the configuration may have changed or be
    incomplete.

    Our own server says at DEL what it said at ADD: without ports there is nothing to look for among
    all pods' elements.
    """
    if config.scope() and not config.capability("portMappings"):
        return
    owned = host_rules.owned(host_rules.PORT_SETS, _tag(call, config))
    host_rules.retract(owned)
    _forget_udp_flows(owned)


def check(call: Call, config: PluginConfig) -> None:
    """CHECK. Raises CniError 120."""
    rules = derive(call, config, _previous(config))
    if not rules.elements:
        return
    if not host_rules.intact():
        raise CniError(DAMAGED, "rules of the nftables table are gone")
    for wanted, found in zip(rules.elements, host_rules.lookup(rules.elements), strict=True):
        if found != wanted:
            raise CniError(DAMAGED, f"{host_rules.describe(wanted)} does not lead into the pod")


def status(call: Call, config: PluginConfig) -> None:
    """STATUS: there is nft, and the configuration can be used."""
    settings_of.parse(config)
    if not host_rules.nft_program():
        raise CniError(NOT_AVAILABLE, "there is no program nft")


def collect(call: Call, config: PluginConfig) -> None:
    """GC: the ports of attachments of this network that are not valid any more."""
    valid = {
        host_rules.owner_tag(config.name, *pair, config.scope())
        for pair in config.valid_attachments()
    }
    stale = [
        e
        for e in host_rules.everything(host_rules.PORT_SETS)
        if host_rules.belongs_to(e.comment, config.name, config.scope()) and e.comment not in valid
    ]
    host_rules.retract(stale)
    _forget_udp_flows(stale)


def derive(call: Call, config: PluginConfig, previous: Result) -> Rules:
    """What ADD opens; pure. Raises CniError."""
    settings = settings_of.parse(config)
    pods = _pod_addresses(call, previous) if settings.mappings else {}
    elements: list[Element] = []
    for mapping in settings.mappings:
        for version in mapping.versions:
            if version in pods:
                pod = pods[version].address
                everyone = host_rules.everyone(version)
                near = (
                    everyone if settings.masquerade_all else pod.network if settings.snat else None
                )
                elements += host_rules.port_elements(
                    mapping.protocol,
                    mapping.host_port,
                    mapping.host_address,
                    pod.ip,
                    mapping.container_port,
                    near,
                    _tag(call, config),
                )
    everyone_of = (
        {host_rules.everyone(version) for version in pods} if settings.masquerade_all else set()
    )
    loopback = settings.snat or settings.masquerade_all
    return Rules(
        elements=tuple(dict.fromkeys(elements)),
        subnets=frozenset(everyone_of | {a.address.network for a in pods.values()}),
        from_loopback=tuple(
            a.address.ip
            for a in pods.values()
            if loopback and isinstance(a.address.ip, IPv4Address)
        ),
    )


def _previous(config: PluginConfig) -> Result:
    previous = config.previous_result()
    if previous is None:
        raise CniError(
            INVALID_CONFIG, "portmap must come behind a plugin that gives the pod addresses"
        )
    return previous


def _pod_addresses(call: Call, previous: Result) -> dict[int, AssignedAddress]:
    """The first address of each family. Raises CniError 7 where the pod has none."""
    found: dict[int, AssignedAddress] = {}
    for assigned in previous.addresses_of(call.ifname, call.netns):
        found.setdefault(assigned.address.version, assigned)
    if not found:
        raise CniError(INVALID_CONFIG, "prevResult holds no address of the pod")
    return found


def _route_loopback(pods: Iterable[IPv4Address]) -> None:
    """Let packets from 127.0.0.1 leave by the link that leads to the pod."""
    with host_socket() as route:
        for pod in pods:
            if index := route_to(route, pod):
                netns.write_sysctl(
                    f"net/ipv4/conf/{socket.if_indextoname(index)}/route_localnet", "1"
                )


def _forget_udp_flows(elements: Iterable[Element]) -> None:
    """Conntrack keeps sending a known UDP flow to where it went before; such flows of changed ports
    are dropped."""
    ports = {host_rules.port_of(e) for e in elements if host_rules.protocol_of(e) == "udp"}
    if ports:
        from cni_plugins.net.conntrack import drop_udp_flows

        drop_udp_flows(ports)


def _tag(call: Call, config: PluginConfig) -> str:
    return host_rules.owner_tag(config.name, call.container_id, call.ifname, config.scope())


PLUGIN = Plugin("portmap", add=add, delete=delete, check=check, status=status, gc=collect)


def main() -> None:
    serve(PLUGIN)
