"""Creates, configures and removes the bridge and the veths. The module `plugin` calls these
functions in the right order."""

from __future__ import annotations

import errno
import os
import time
from ipaddress import IPv6Address

from cni_plugins.bridge.addressing import Addressing
from cni_plugins.bridge.settings import BridgeSettings
from cni_plugins.net import netns
from cni_plugins.net.neighbours import advertise, open_advertiser
from cni_plugins.net.netlink import NetlinkSocket
from cni_plugins.net.pod import PodNamespace, open_pod
from cni_plugins.net.rtnetlink import (
    IFA_F_DADFAILED,
    IFA_F_TENTATIVE,
    IFF_PROMISC,
    IFF_UP,
    Link,
    LinkAddress,
    addresses,
    delete_address,
    delete_link,
    find_link,
    is_local,
    new_address,
    new_bridge,
    new_neighbour,
    new_route,
    new_veth,
    set_link,
)
from cni_plugins.protocol.addresses import AddressInNetwork
from cni_plugins.protocol.errors import DAMAGED, INVALID_CONFIG, IO_FAILURE, CniError
from pyrunc.errors import KernelError

_DAD_TIMEOUT_S = 10.0
_FORWARDING_TIMEOUT_S = 0.5
_SCOPE_LINK = 253
_FORWARDING = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}


def ensure_bridge(host: NetlinkSocket, settings: BridgeSettings) -> Link:
    """Return the bridge, creating it if it is missing. Several processes may call this at the same
    time. Raises CniError INVALID_CONFIG if a link of this name exists and is not a bridge."""
    link = find_link(host, name=settings.bridge)
    if link is None:
        request = new_bridge(settings.bridge, mac=_own_mac(), mtu=settings.mtu)
        host.try_call(request, errno.EEXIST)
        # Otherwise a pod that sends router advertisements becomes the host's default route for
        # IPv6.
        netns.write_sysctl(f"net/ipv6/conf/{settings.bridge}/accept_ra", "0")  # CVE-2020-10749
        # Duplicate detection would delay the link-local address by 2 s, and without that address
        # the host cannot resolve a pod's neighbour entry.
        netns.write_sysctl(f"net/ipv6/conf/{settings.bridge}/accept_dad", "0")
        link = find_link(host, name=settings.bridge)
    if link is None or link.kind != "bridge":
        raise CniError(INVALID_CONFIG, f"{settings.bridge} exists and is not a bridge")
    flags = IFF_UP | (IFF_PROMISC if settings.promiscuous else 0)
    if link.flags & flags != flags:
        host.call(set_link(index=link.index, flags=flags, change=flags))
    return link


def attach_veth(
    host: NetlinkSocket,
    pod: PodNamespace,
    bridge: Link,
    settings: BridgeSettings,
    *,
    name: str,
    ifname: str,
    tag: str,
    mac: str,
) -> None:
    """Create the veth of a pod. Raises KernelError.

    The host end `name` is up, is a port of the bridge, and has the alias `tag`. The other end
    `ifname` is in the pod's namespace and has the MAC address `mac`.
    """
    # A separate request: rtnl_newlink() reads a port's options and the alias only for a link that
    # exists already (net/core/rtnetlink.c).
    port = set_link(
        name=name, alias=tag, hairpin=settings.hairpin or None, isolated=settings.isolated or None
    )
    veth = new_veth(
        name, ifname, peer_netns=pod.fd, master=bridge.index, mtu=settings.mtu, peer_mac=mac
    )
    created, labelled = host.attempt(veth, port)
    if (
        isinstance(created, KernelError)
        and created.errno == errno.EEXIST
        and _remove_quiesced(host, name)
    ):
        created, labelled = host.attempt(veth, port)
    for outcome in (created, labelled):
        if isinstance(outcome, KernelError):
            if outcome is labelled:
                host.attempt(delete_link(name=name))
            raise outcome


def configure_pod(
    pod: PodNamespace, ifname: str, addressing: Addressing, settings: BridgeSettings
) -> Link:
    """Set the pod's interface up and add its addresses and routes. Return the interface. With
    `detect_duplicates` in `settings`, wait for duplicate address detection.

    Raises:

    - CniError DAMAGED if another host has the pod's IPv6 address
    - CniError IO_FAILURE if the detection takes too long or the interface has been removed
    - KernelError
    """
    with pod.entered() as inner:
        if 6 in addressing.versions:
            # A new namespace may have IPv6 disabled: it starts with the kernel's defaults, or with
            # the host's (net.core.devconf_inherit_init_net).
            netns.write_sysctl(f"net/ipv6/conf/{ifname}/disable_ipv6", "0")
            netns.write_sysctl(
                f"net/ipv6/conf/{ifname}/accept_dad", "1" if settings.detect_duplicates else "0"
            )
            pod.advertiser = open_advertiser()
    link = find_link(inner, name=ifname)
    if link is None:
        raise CniError(IO_FAILURE, f"interface {ifname} was removed while the plugin set it up")
    if not settings.container_interface_down:
        # Up, addresses, routes, in this order: the kernel refuses a route out of a link that is
        # down, and a route whose gateway is in no subnet of the link (fib_check_nh,
        # net/ipv4/fib_semantics.c).
        pod.pending.append(set_link(index=link.index, flags=IFF_UP, change=IFF_UP))
    skip_dad = not settings.detect_duplicates
    pod.pending += [new_address(link.index, a.address, skip_dad=skip_dad) for a in addressing.ips]
    pod.pending += [
        new_route(r.destination, oif=link.index, gateway=r.gateway, numbers=r.numbers)
        for r in addressing.routes
    ]
    pod.send_pending()
    if settings.detect_duplicates:
        _wait_for_dad(inner, link.index)
    return link


def configure_gateway(
    host: NetlinkSocket, bridge: Link, addressing: Addressing, settings: BridgeSettings
) -> None:
    """Give the bridge the gateway addresses, and enable IP forwarding on the host for their IP
    versions. Raises KernelError, OSError, and CniError INVALID_CONFIG if the bridge has a
    conflicting address."""
    if not addressing.gateways:
        return
    bridge_addresses = addresses(host, bridge.index)
    for gateway in addressing.gateways:
        if any(existing.address == gateway for existing in bridge_addresses):
            continue
        for foreign in (f for f in bridge_addresses if _collides(f, gateway, addressing)):
            if not settings.force_address:
                raise CniError(
                    INVALID_CONFIG,
                    f"bridge {bridge.name} has the address {foreign.address}, not the gateway"
                    f" {gateway}; forceAddress replaces the address",
                )
            host.try_call(delete_address(bridge.index, foreign.address), errno.EADDRNOTAVAIL)
        # Pods that start at the same time all set up the bridge, in other workers or other
        # runtimes.
        host.try_call(new_address(bridge.index, gateway), errno.EEXIST)
    for version in {gateway.version for gateway in addressing.gateways}:
        netns.write_sysctl(_FORWARDING[version], "1")


def wait_for_forwarding(host: NetlinkSocket, name: str, settings: BridgeSettings) -> Link:
    """Wait until the bridge forwards packets from its port `name`, and return the port. This
    usually takes 0.3 ms. If STP delays forwarding, return after 0.5 s. Raises CniError IO_FAILURE
    if the port disappears."""
    # Without this wait the first packets of 5 pods of 72 were lost, and sent again after a second.
    deadline = time.monotonic() + _FORWARDING_TIMEOUT_S
    while True:
        link = find_link(host, name=name)
        if link is None:
            raise CniError(IO_FAILURE, f"interface {name} was removed while the plugin set it up")
        if link.forwarding or settings.container_interface_down or time.monotonic() > deadline:
            return link
        time.sleep(0.0002)


def announce(
    host: NetlinkSocket, pod: PodNamespace, bridge: Link, inner: Link, addressing: Addressing
) -> None:
    """Announce the pod's MAC address to the host and to IPv6 neighbours. Their caches may still
    contain the MAC address of a previous pod that had the same IP address.

    IPv4 neighbours need no announcement, because the MAC address is derived from the IPv4
    address."""
    if addressing.gateways:
        host.attempt(
            *(new_neighbour(bridge.index, a.address.ip, inner.mac) for a in addressing.ips)
        )
    # Without the advertisement, neighbours that knew the previous hardware address could not reach
    # a reused IPv6 address for 8 s.
    addresses6 = [a.address.ip for a in addressing.ips if isinstance(a.address.ip, IPv6Address)]
    if addresses6 and pod.advertiser is not None:
        deadline = time.monotonic() + _FORWARDING_TIMEOUT_S
        # The kernel finishes new addresses in a work queue (addrconf_dad_work). Until then it
        # accepts no packets for them.
        while not all(is_local(pod.route, a) for a in addresses6) and time.monotonic() < deadline:
            time.sleep(0.0002)
        advertise(pod.advertiser, inner.index, inner.mac, addresses6)


def disconnect(host: NetlinkSocket, name: str) -> bool:
    """Delete the veth whose host end is `name`. This takes the kernel 16 to 24 ms. Returns False if
    the veth does not exist."""
    return host.try_call(delete_link(name=name), errno.ENODEV) is not None


def quiesce(host: NetlinkSocket, name: str) -> bool:
    """Set the veth's host end `name` down, in 0.1 ms, so that no packet passes. The kernel deletes
    the veth later, together with the pod's namespace. Returns False if the veth does not exist."""
    return host.try_call(set_link(name=name, change=IFF_UP), errno.ENODEV) is not None


def remove_from_pod(path: str, ifname: str) -> None:
    """Delete the veth `ifname` in the network namespace at `path`. DEL uses this for a veth that
    the reference plugin made: its host end has a name that this plugin cannot derive."""
    if not path or not netns.exists(path):
        return
    with open_pod(path) as pod:
        link = find_link(pod.route, name=ifname)
        if link is not None and link.kind == "veth":
            disconnect(pod.route, ifname)


def _remove_quiesced(host: NetlinkSocket, name: str) -> bool:
    """Delete the veth `name` if it is down, as `quiesce` leaves it. Returns whether it was
    deleted."""
    link = find_link(host, name=name)
    return link is not None and not link.up and disconnect(host, name)


def _collides(existing: LinkAddress, gateway: AddressInNetwork, addressing: Addressing) -> bool:
    """Return whether the bridge must lose its address `existing` to get the address `gateway`.

    Addresses of the other IP version, and those in `addressing.gateways`, never collide. Any other
    IPv4 address collides. An IPv6 address that is not link-local collides if the subnets
    overlap."""
    if existing.address.version != gateway.version or existing.address in addressing.gateways:
        return False
    if gateway.version == 4:
        return True
    return existing.scope != _SCOPE_LINK and existing.address.network.overlaps(gateway.network)


def _wait_for_dad(route: NetlinkSocket, index: int) -> None:
    deadline = time.monotonic() + _DAD_TIMEOUT_S
    while True:
        flags = [
            address.flags for address in addresses(route, index) if address.address.version == 6
        ]
        if any(f & IFA_F_DADFAILED for f in flags):
            raise CniError(DAMAGED, "another host has the pod's IPv6 address")
        if not any(f & IFA_F_TENTATIVE for f in flags):
            return
        if time.monotonic() > deadline:
            raise CniError(
                IO_FAILURE, f"duplicate address detection took longer than {_DAD_TIMEOUT_S:g} s"
            )
        # Detection takes a second or more, so there is no gain in asking more often.
        time.sleep(0.05)


def _own_mac() -> str:
    """Return a random, locally administered unicast MAC address for the bridge."""
    first, *rest = os.urandom(6)
    return bytes([first & 0xFC | 0x02, *rest]).hex(":")
