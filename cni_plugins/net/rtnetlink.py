"""Builds rtnetlink requests for links, addresses and routes, and decodes the answers (rtnetlink(7);
include/uapi/linux/{if_link,rtnetlink,if_addr}.h). Covers only what the plugins need.

One RTM_NEWLINK creates both ends of a veth in their final state: the host end is up and is a port
of the bridge, the other end is in the pod's namespace and has its final name. Moving a link to
another namespace later would take 20 ms instead of 0.4 ms (measured), because the kernel then waits
for an RCU grace period under the rtnl lock.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface

from cni_plugins.net.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    HostSocket,
    NetlinkRequest,
    NetlinkSocket,
    attribute,
    attributes,
    nested,
    text,
)
from cni_plugins.protocol.addresses import Address, AddressInNetwork, Network

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _GETROUTE = 24, 26
_NEWNEIGH = 28

IFF_UP, IFF_PROMISC = 0x1, 0x100
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_LINKINFO = 1, 3, 4, 10, 18
_IFLA_IFALIAS, _IFLA_NET_NS_FD, _IFLA_EXT_MASK, _IFLA_TXQ, _IFLA_RXQ = 20, 28, 29, 31, 32
_IFLA_OPERSTATE = 16
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA, _VETH_PEER = 1, 2, 4, 5, 1
_BRPORT_STATE, _BRPORT_MODE, _BRPORT_ISOLATED = 1, 4, 33
_FORWARDING, _OPERATIONAL = b"\3", b"\6"
_SKIP_STATISTICS = 8

_IFA_ADDRESS, _IFA_LOCAL, _IFA_BROADCAST, _IFA_FLAGS = 1, 2, 4, 8
IFA_F_NODAD, IFA_F_TENTATIVE, IFA_F_DADFAILED = 0x02, 0x40, 0x08
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_METRICS, _RTA_TABLE = 1, 4, 5, 6, 8, 15
_RTAX_MTU, _RTAX_ADVMSS = 2, 8
_RTN_LOCAL = 2
_NDA_DST, _NDA_LLADDR, _NUD_STALE = 1, 2, 4
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_CREATE = NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL
_TABLE_MAIN, _PROTO_BOOT, _SCOPE_UNIVERSE, _SCOPE_LINK, _UNICAST = 254, 3, 0, 253, 1


@dataclass(frozen=True, slots=True)
class Link:
    """A link as the kernel describes it.

    `forwarding`: the bridge forwards packets from this port, and the link is operational. Both are
    needed, because the kernel reports a new port as forwarding before it has checked the port's
    carrier.
    """

    index: int
    name: str
    flags: int
    mac: str
    mtu: int
    kind: str
    forwarding: bool

    @property
    def up(self) -> bool:
        return bool(self.flags & IFF_UP)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """An address of the link with number `index`. `flags`: IFA_F_*; `scope`: RT_SCOPE_*."""

    index: int
    address: AddressInNetwork
    flags: int
    scope: int


def open_route_socket() -> NetlinkSocket:
    """Open a route netlink socket in the current network namespace."""
    return NetlinkSocket(socket.NETLINK_ROUTE)


host_socket = HostSocket(socket.NETLINK_ROUTE)


def new_veth(
    host_name: str,
    peer_name: str,
    *,
    peer_netns: int,
    master: int = 0,
    mtu: int = 0,
    peer_mac: str = "",
) -> NetlinkRequest:
    """Build the request that creates a veth. Its host end is up and is a port of the bridge with
    index `master`. Its other end is in the network namespace of the descriptor `peer_netns`."""
    # The default is a queue for each possible processor, on both ends (veth_get_num_queues,
    # drivers/net/veth.c), which takes memory for each pod.
    queues = attribute(_IFLA_TXQ, 1) + attribute(_IFLA_RXQ, 1)
    size = attribute(_IFLA_MTU, mtu) if mtu else b""
    peer = (
        _link_header()
        + attribute(_IFLA_IFNAME, peer_name)
        + attribute(_IFLA_NET_NS_FD, peer_netns)
        + queues
        + size
    )
    if peer_mac:
        peer += attribute(_IFLA_ADDRESS, pack_mac(peer_mac))
    info = attribute(
        _IFLA_LINKINFO,
        attribute(_INFO_KIND, b"veth") + attribute(_INFO_DATA, attribute(_VETH_PEER, peer)),
    )
    body = (
        _link_header(flags=IFF_UP, change=IFF_UP)
        + attribute(_IFLA_IFNAME, host_name)
        + queues
        + size
    )
    if master:
        body += attribute(_IFLA_MASTER, master)
    return NetlinkRequest(
        _NEWLINK,
        body + info,
        "RTM_NEWLINK",
        f"veth {host_name}",
        _CREATE,
    )


def new_bridge(name: str, *, mac: str, mtu: int = 0) -> NetlinkRequest:
    """Build the request (RTM_NEWLINK) that creates a bridge and sets it up."""
    body = _link_header(flags=IFF_UP, change=IFF_UP) + attribute(_IFLA_IFNAME, name)
    body += attribute(_IFLA_ADDRESS, pack_mac(mac)) + (attribute(_IFLA_MTU, mtu) if mtu else b"")
    # Without IFLA_ADDRESS the bridge takes the lowest address of its ports, which changes with the
    # pods (br_stp_recalculate_bridge_id, net/bridge/br_stp_if.c).
    body += attribute(_IFLA_LINKINFO, attribute(_INFO_KIND, b"bridge"))
    return NetlinkRequest(_NEWLINK, body, "RTM_NEWLINK", f"bridge {name}", _CREATE)


def set_link(
    *,
    index: int = 0,
    name: str = "",
    flags: int = 0,
    change: int = 0,
    alias: str = "",
    hairpin: bool | None = None,
    isolated: bool | None = None,
) -> NetlinkRequest:
    """Build the request that changes the link with this `index` or `name`.

    - `flags`, `change`: of the flags in `change`, set those in `flags` and clear the others
    - `alias`: empty to leave the alias unchanged
    - `hairpin`, `isolated`: for a bridge's port; None to leave them unchanged
    """
    body = _link_header(index=index, flags=flags, change=change)
    body += attribute(_IFLA_IFNAME, name) if name and not index else b""
    body += attribute(_IFLA_IFALIAS, alias.encode()) if alias else b""
    port = b"" if hairpin is None else attribute(_BRPORT_MODE, bytes([hairpin]))
    port += b"" if isolated is None else attribute(_BRPORT_ISOLATED, bytes([isolated]))
    if port:
        body += attribute(
            _IFLA_LINKINFO,
            attribute(_INFO_SLAVE_KIND, b"bridge") + attribute(_INFO_SLAVE_DATA, port),
        )
    return NetlinkRequest(_NEWLINK, body, "RTM_NEWLINK", f"link {name or index}")


def delete_link(name: str) -> NetlinkRequest:
    """Build the request that deletes a link. If the link is one end of a veth, both ends are
    deleted. The kernel answers after an RCU grace period, 16 to 24 ms."""
    body = _link_header() + attribute(_IFLA_IFNAME, name)
    return NetlinkRequest(_DELLINK, body, "RTM_DELLINK", f"link {name}")


def new_address(index: int, address: AddressInNetwork, *, skip_dad: bool = True) -> NetlinkRequest:
    """Build the request that adds an address to the link with this index. `skip_dad`: skip
    duplicate address detection, so that an IPv6 address is usable at once."""
    packed = address.ip.packed
    body = (
        _address_header(address, index)
        + attribute(_IFA_LOCAL, packed)
        + attribute(_IFA_ADDRESS, packed)
    )
    if isinstance(address, IPv6Interface):
        # Duplicate address detection takes 1 to 3 s, and the address cannot be bound to meanwhile.
        body += attribute(_IFA_FLAGS, IFA_F_NODAD) if skip_dad else b""
    # A /31 has two hosts and no broadcast address (RFC 3021).
    elif address.network.prefixlen < 31:
        body += attribute(_IFA_BROADCAST, address.network.broadcast_address.packed)
    return NetlinkRequest(_NEWADDR, body, "RTM_NEWADDR", str(address), _CREATE)


def delete_address(index: int, address: AddressInNetwork) -> NetlinkRequest:
    body = _address_header(address, index) + attribute(_IFA_LOCAL, address.ip.packed)
    return NetlinkRequest(_DELADDR, body, "RTM_DELADDR", str(address))


def new_route(
    destination: Network,
    *,
    oif: int,
    gateway: Address | None = None,
    numbers: Iterable[tuple[str, int]] = (),
) -> NetlinkRequest:
    """Build the request that adds a unicast route out of the link with index `oif`. `numbers`:
    (name, value) for each of CNI's mtu, advmss, priority, table and scope that is set."""
    options = dict(numbers)
    family = _FAMILIES[destination.version]
    table = options.get("table", _TABLE_MAIN)
    scope = options.get("scope", _SCOPE_UNIVERSE if gateway else _SCOPE_LINK)
    body = struct.pack(
        "BBBBBBBBI",
        family,
        destination.prefixlen,
        0,
        0,
        # rtm_table has eight bits; a larger number is only in RTA_TABLE, as iproute2 writes it.
        table if table < 256 else 0,
        _PROTO_BOOT,
        scope,
        _UNICAST,
        0,
    )
    if destination.prefixlen:
        body += attribute(_RTA_DST, destination.network_address.packed)
    body += attribute(_RTA_GATEWAY, gateway.packed) if gateway else b""
    body += attribute(_RTA_OIF, oif) + attribute(_RTA_TABLE, table)
    body += attribute(_RTA_PRIORITY, options["priority"]) if "priority" in options else b""
    metrics = b"".join(
        attribute(kind, options[name])
        for name, kind in (("mtu", _RTAX_MTU), ("advmss", _RTAX_ADVMSS))
        if name in options
    )
    body += nested(_RTA_METRICS, metrics) if metrics else b""
    subject = f"{destination}" + (f" via {gateway}" if gateway else "")
    return NetlinkRequest(_NEWROUTE, body, "RTM_NEWROUTE", subject, _CREATE)


def new_neighbour(index: int, address: Address, mac: str) -> NetlinkRequest:
    """Build the request that sets the neighbour entry of `address` to `mac`, replacing an existing
    entry. The kernel verifies the entry when it uses it (NUD_STALE)."""
    family = _FAMILIES[address.version]
    body = struct.pack("BxxxiHBB", family, index, _NUD_STALE, 0, 0)
    body += attribute(_NDA_DST, address.packed) + attribute(_NDA_LLADDR, pack_mac(mac))
    return NetlinkRequest(
        _NEWNEIGH, body, "RTM_NEWNEIGH", str(address), NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
    )


def find_link(route: NetlinkSocket, *, name: str = "", index: int = 0) -> Link | None:
    """Return the link with this name or index; None if there is no such link."""
    body = _link_header(index=index) + (attribute(_IFLA_IFNAME, name) if name else b"")
    # Without this the kernel sums IPv6's counters over all processors for each answer
    # (inet6_fill_ifla6_attrs, net/ipv6/addrconf.c).
    body += attribute(_IFLA_EXT_MASK, _SKIP_STATISTICS)
    request = NetlinkRequest(_GETLINK, body, "RTM_GETLINK", name or str(index), flags=0)
    answers = route.try_call(request, errno.ENODEV, errno.ENOENT)
    return _link(answers[0]) if answers else None


def addresses(route: NetlinkSocket, index: int) -> list[LinkAddress]:
    """Return the IPv4 and IPv6 addresses of the link with this index."""
    request = NetlinkRequest(
        _GETADDR, struct.pack("BBBBI", 0, 0, 0, 0, index), "RTM_GETADDR", str(index)
    )
    return [
        address
        for answer in route.dump(request)
        if (address := _address(answer)) and address.index == index
    ]


def route_to(route: NetlinkSocket, destination: Address) -> int:
    """Return the index of the link through which packets to `destination` leave; 0 without a
    route."""
    route_message = _lookup(route, destination)
    return _int(attributes(route_message, 12).get(_RTA_OIF)) if route_message else 0


def is_local(route: NetlinkSocket, address: Address) -> bool:
    """Return whether the socket's network namespace accepts packets to `address` as its own."""
    route_message = _lookup(route, address)
    return bool(route_message) and route_message[7] == _RTN_LOCAL


def _lookup(route: NetlinkSocket, destination: Address) -> bytes:
    """Return the kernel's route to `destination` as a netlink body; empty without a route."""
    family, bits = _FAMILIES[destination.version], destination.max_prefixlen
    header = struct.pack("BBBBBBBBI", family, bits, 0, 0, 0, 0, 0, 0, 0)
    body = header + attribute(_RTA_DST, destination.packed)
    request = NetlinkRequest(_GETROUTE, body, "RTM_GETROUTE", str(destination), flags=0)
    answers = route.try_call(request, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ESRCH)
    return answers[0] if answers else b""


def pack_mac(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", "").replace("-", ""))


def _link_header(*, index: int = 0, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("BxHiII", 0, 0, index, flags, change)


def _address_header(address: AddressInNetwork, index: int) -> bytes:
    family = _FAMILIES[address.version]
    return struct.pack("BBBBI", family, address.network.prefixlen, 0, 0, index)


def _link(body: bytes) -> Link:
    _, _, index, flags, _ = struct.unpack_from("BxHiII", body)
    fields = attributes(body, 16)
    info = attributes(fields.get(_IFLA_LINKINFO, b""))
    port = (
        attributes(info.get(_INFO_SLAVE_DATA, b""))
        if text(info.get(_INFO_SLAVE_KIND)) == "bridge"
        else {}
    )
    return Link(
        index=index,
        name=text(fields.get(_IFLA_IFNAME)),
        flags=flags,
        mac=fields.get(_IFLA_ADDRESS, b"").hex(":"),
        mtu=_int(fields.get(_IFLA_MTU)),
        kind=text(info.get(_INFO_KIND)),
        forwarding=port.get(_BRPORT_STATE) == _FORWARDING
        and fields.get(_IFLA_OPERSTATE) == _OPERATIONAL,
    )


def _address(body: bytes) -> LinkAddress | None:
    family, prefix, flags, scope, index = struct.unpack_from("BBBBI", body)
    fields = attributes(body, 8)
    # IFA_ADDRESS is the peer's address on a point-to-point link (rtnetlink(7)); IPv6 has no
    # IFA_LOCAL.
    packed = fields.get(_IFA_LOCAL) or fields.get(_IFA_ADDRESS)
    if packed is None or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address = (IPv4Interface if family == socket.AF_INET else IPv6Interface)((packed, prefix))
    return LinkAddress(
        index=index, address=address, flags=_int(fields.get(_IFA_FLAGS)) or flags, scope=scope
    )


def _int(value: bytes | None) -> int:
    return int(struct.unpack_from("I", value)[0]) if value and len(value) >= 4 else 0
