"""The plugin portmap: forwards host ports to pods with elements of nftables maps.

A host port is also forwarded from 127.0.0.1. This needs masquerade of the client and the sysctl
route_localnet on the bridge. route_localnet alone would let other hosts reach 127.0.0.0/8
(CVE-2020-8558), so the nftables chain `guard` drops their packets.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address

from cni_plugins.net import host_rules, netns
from cni_plugins.net.nfnetlink import Element
from cni_plugins.net.rtnetlink import host_socket, route_to
from cni_plugins.portmap import settings
from cni_plugins.protocol.addresses import ANYWHERE, Network
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import PluginConfig
from cni_plugins.protocol.errors import DAMAGED, INVALID_CONFIG, NOT_AVAILABLE, CniError
from cni_plugins.protocol.result import AssignedAddress, Result
from cni_plugins.skel import CniPlugin, serve


@dataclass(frozen=True, slots=True)
class Rules:
    """What ADD installs for an attachment.

    - `elements`: elements of the nftables maps
    - `subnets`: the subnets whose nftables chains the elements use
    - `from_loopback`: the pod's IPv4 addresses that clients on 127.0.0.1 may reach
    """

    elements: tuple[Element, ...]
    subnets: frozenset[Network]
    from_loopback: tuple[IPv4Address, ...]


def add(call: CniCall, config: PluginConfig) -> Result:
    """Run ADD: forward the requested host ports, and return prevResult. Raises CniError, and
    AlreadyExists if a port is taken."""
    previous = _previous(config)
    rules = derive(call, config, previous)
    if rules.elements:
        host_rules.add_elements(rules.elements, rules.subnets)
        _route_loopback(rules.from_loopback)
        _drop_udp_flows(rules.elements)
    return previous


def delete(call: CniCall, config: PluginConfig) -> None:
    """Run DEL: remove the nftables elements whose comment is the attachment's tag.

    Does nothing if the call has a scope but no port mappings. pyrunc's server sets the scope and
    passes ADD's port mappings to DEL, too, so this pod has no elements."""
    if config.scope() and not config.capability("portMappings"):
        return
    owned = host_rules.all_elements(host_rules.PORT_SETS, host_rules.tag_of(call, config))
    host_rules.remove_elements(owned)
    _drop_udp_flows(owned)


def check(call: CniCall, config: PluginConfig) -> None:
    """Run CHECK. Raises CniError DAMAGED if a rule or element of ADD is missing or different."""
    rules = derive(call, config, _previous(config))
    if not rules.elements:
        return
    if not host_rules.is_intact():
        raise CniError(DAMAGED, "rules of pyrunc's nftables table are missing")
    for expected, existing in zip(rules.elements, host_rules.lookup(rules.elements), strict=True):
        if existing != expected:
            raise CniError(DAMAGED, f"{host_rules.describe(expected)} is not forwarded to the pod")


def status(call: CniCall, config: PluginConfig) -> None:
    """Run STATUS. Raises CniError NOT_AVAILABLE without nft, or another code for a wrong
    configuration."""
    settings.parse(config)
    if not host_rules.nft_program():
        raise CniError(NOT_AVAILABLE, "the command nft does not exist")


def collect(call: CniCall, config: PluginConfig) -> None:
    """Run GC: remove the host ports of stale attachments to this network. An attachment is stale if
    the runtime does not list it as valid."""
    is_stale = host_rules.stale_tags(config)
    stale = [e for e in host_rules.all_elements(host_rules.PORT_SETS) if is_stale(e.comment)]
    host_rules.remove_elements(stale)
    _drop_udp_flows(stale)


def derive(call: CniCall, config: PluginConfig, previous: Result) -> Rules:
    """Return the rules that ADD installs for the configuration and the result `previous`. Raises
    CniError if the configuration is invalid, or if a port is to be forwarded and `previous` has no
    address of the pod."""
    options = settings.parse(config)
    masquerades = options.snat or options.masquerade_all
    pods = _pod_addresses(call, previous) if options.mappings else {}
    elements: list[Element] = []
    for mapping in options.mappings:
        for version in mapping.versions:
            if version in pods:
                pod = pods[version].address
                clients = ANYWHERE[version] if options.masquerade_all else pod.network
                elements += host_rules.port_elements(
                    mapping.protocol,
                    mapping.host_port,
                    mapping.host_address,
                    pod.ip,
                    mapping.container_port,
                    clients if masquerades else None,
                    host_rules.tag_of(call, config),
                )
    subnets = {a.address.network for a in pods.values()}
    if options.masquerade_all:
        subnets |= {ANYWHERE[version] for version in pods}
    return Rules(
        elements=tuple(dict.fromkeys(elements)),
        subnets=frozenset(subnets),
        from_loopback=tuple(
            a.address.ip
            for a in pods.values()
            if masquerades and isinstance(a.address.ip, IPv4Address)
        ),
    )


def _previous(config: PluginConfig) -> Result:
    previous = config.previous_result()
    if previous is None:
        raise CniError(
            INVALID_CONFIG, "portmap must follow a plugin that assigns addresses to the pod"
        )
    return previous


def _pod_addresses(call: CniCall, previous: Result) -> dict[int, AssignedAddress]:
    """Map each IP version (4, 6) to the pod's first address of this version. Raises CniError
    INVALID_CONFIG if `previous` has no address of the pod."""
    addresses: dict[int, AssignedAddress] = {}
    for assigned in previous.addresses_of(call.ifname, call.netns):
        addresses.setdefault(assigned.address.version, assigned)
    if not addresses:
        raise CniError(INVALID_CONFIG, "prevResult holds no address of the pod")
    return addresses


def _route_loopback(pods: Iterable[IPv4Address]) -> None:
    """Enable the sysctl route_localnet on the links that lead to `pods`, so that packets from
    127.0.0.1 can leave through them."""
    with host_socket() as route:
        for pod in pods:
            # route_localnet alone lets neighbours of the host reach its services on 127.0.0.1
            # (CVE-2020-8558): the table's chain `guard` drops their packets.
            if index := route_to(route, pod):
                netns.write_sysctl(
                    f"net/ipv4/conf/{socket.if_indextoname(index)}/route_localnet", "1"
                )


def _drop_udp_flows(elements: Iterable[Element]) -> None:
    """Delete the UDP flows of changed ports. Otherwise conntrack would send their packets to the
    previous destination. Prints an error instead of raising it."""
    # Each packet of a UDP client renews its flow (nf_conntrack_udp_timeout, 30 s by default), and
    # the nat chains see only the first one. A TCP flow ends with its connection.
    ports = {host_rules.port_of(e) for e in elements if host_rules.protocol_of(e) == "udp"}
    if ports:
        from pyroute2.netlink.exceptions import NetlinkError

        from cni_plugins.net.conntrack import drop_udp_flows

        try:
            drop_udp_flows(ports)
        # For example a kernel without nf_conntrack_netlink. The ports work without this, as under
        # the reference plugin; only clients that do not pause keep the previous destination.
        except (NetlinkError, OSError) as error:
            print(f"portmap: cannot delete UDP flows: {error}", file=sys.stderr)


PLUGIN = CniPlugin("portmap", add=add, delete=delete, check=check, status=status, gc=collect)


def main() -> None:
    serve(PLUGIN)
