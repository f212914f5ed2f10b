"""Tests the rtnetlink codec with pyroute2: each parses the other's requests."""

from __future__ import annotations

import errno
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from pyroute2 import IPRoute

from cni_plugins.net import inventory, netns
from cni_plugins.net.rtnetlink import (
    IFF_UP,
    addresses,
    delete_address,
    delete_link,
    find_link,
    new_address,
    new_bridge,
    new_route,
    new_veth,
    open_route_socket,
    route_to,
    set_link,
)
from pyrunc.errors import KernelError
from tests.kernel.cni.harness import Host
from tests.kernel.cni.harness import find_link as find_by_pyroute2


def test_pyroute2_reads_links_of_the_codec(host: Host) -> None:
    pod = host.pod()
    with open_route_socket() as route:
        route.call(new_bridge("br0", mac="02:00:00:00:00:01", mtu=1420))
        bridge = find_link(route, name="br0")
        assert bridge is not None and bridge.up and bridge.kind == "bridge" and bridge.mtu == 1420
        veth = new_veth(
            "v0",
            "eth9",
            peer_netns=pod.fd,
            master=bridge.index,
            mtu=1410,
            peer_mac="02:00:00:00:00:02",
        )
        route.call(veth, set_link(name="v0", alias="net/a/eth0", hairpin=True, isolated=True))
    state = find_by_pyroute2("br0")
    assert state.get_attr("IFLA_ADDRESS") == "02:00:00:00:00:01"
    port = find_by_pyroute2("v0")
    data = port.get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_SLAVE_DATA")
    assert port.get_attr("IFLA_MASTER") == state["index"] and port["flags"] & 1
    assert port.get_attr("IFLA_IFALIAS") == "net/a/eth0" and port.get_attr("IFLA_MTU") == 1410
    assert data.get_attr("IFLA_BRPORT_MODE") == data.get_attr("IFLA_BRPORT_ISOLATED") == 1
    with netns.entered(pod.fd):
        peer = find_by_pyroute2("eth9")
    assert (
        peer.get_attr("IFLA_ADDRESS") == "02:00:00:00:00:02" and peer.get_attr("IFLA_MTU") == 1410
    )
    assert not peer["flags"] & 1
    listed = next(x for x in inventory.links() if x.name == "v0")
    assert (
        listed.hairpin
        and listed.isolated
        and listed.alias == "net/a/eth0"
        and listed.kind == "veth"
    )


def test_the_codec_reads_links_of_pyroute2(host: Host) -> None:
    with IPRoute() as route:
        route.link("add", ifname="br1", kind="bridge", mtu=1300, address="02:00:00:00:00:03")
        route.link("add", ifname="d0", kind="veth", peer="d1")
        master = route.link_lookup(ifname="br1")[0]
        route.link(
            "set",
            index=route.link_lookup(ifname="d0")[0],
            master=master,
            state="up",
        )
    with open_route_socket() as codec:
        bridge, port = find_link(codec, name="br1"), find_link(codec, name="d0")
        assert bridge is not None and port is not None
        assert (bridge.kind, bridge.mtu, bridge.mac, bridge.up) == (
            "bridge",
            find_by_pyroute2("br1").get_attr("IFLA_MTU"),
            "02:00:00:00:00:03",
            False,
        )
        assert (port.kind, port.up) == ("veth", True)
        assert find_link(codec, index=port.index) == port
        assert find_link(codec, name="nothing") is None and find_link(codec, index=9999) is None


def test_addresses_and_routes_agree_with_pyroute2(host: Host) -> None:
    with IPRoute() as route:
        route.link("add", ifname="d0", kind="veth", peer="d1")
        index = route.link_lookup(ifname="d0")[0]
    with open_route_socket() as codec:
        expected = [
            ip_interface("10.5.0.1/24"),
            ip_interface("10.6.0.1/31"),
            ip_interface("fd05::1/64"),
        ]
        codec.call(
            set_link(index=index, flags=IFF_UP, change=IFF_UP),
            *(new_address(index, address) for address in expected),
            new_route(
                ip_network("10.7.0.0/16"),
                oif=index,
                gateway=ip_address("10.5.0.9"),
                numbers=(("mtu", 1280), ("table", 500)),
            ),
            new_route(
                ip_network("10.8.0.0/16"),
                oif=index,
                gateway=ip_address("10.5.0.9"),
                numbers=(("priority", 5),),
            ),
            new_route(ip_network("fd07::/48"), oif=index, gateway=ip_address("fd05::9")),
            new_route(ip_network("10.9.0.0/16"), oif=index),
        )
        mine = {a.address for a in addresses(codec, index)}
        assert set(expected) <= mine
        assert (
            route_to(codec, ip_address("10.8.1.1"))
            == route_to(codec, ip_address("fd07::1"))
            == index
        )
        assert route_to(codec, ip_address("203.0.113.1")) == 0
    with IPRoute() as route:
        theirs = {(a.get_attr("IFA_ADDRESS"), a["prefixlen"]) for a in route.get_addr(index=index)}
        broadcast = next(
            a.get_attr("IFA_BROADCAST")
            for a in route.get_addr(index=index)
            if a.get_attr("IFA_ADDRESS") == "10.5.0.1"
        )
    assert (
        {(str(a.ip), a.network.prefixlen) for a in mine}
        == theirs
        == {(str(a.ip), a.network.prefixlen) for a in inventory.addresses(index)}
    )
    assert broadcast == "10.5.0.255"
    installed = {
        (str(r.destination), r.gateway, r.table, r.priority)
        for r in inventory.routes()
        if r.oif == index
    }
    assert {
        ("10.7.0.0/16", "10.5.0.9", 500, 0),
        ("10.8.0.0/16", "10.5.0.9", 254, 5),
        ("fd07::/48", "fd05::9", 254, 1024),
        ("10.9.0.0/16", "", 254, 0),
    } <= installed


def test_addresses_and_links_are_removed(host: Host) -> None:
    with IPRoute() as route:
        route.link("add", ifname="d0", kind="veth", peer="d1")
        index = route.link_lookup(ifname="d0")[0]
        route.addr("add", index=index, address="10.5.0.1", prefixlen=24)
    with open_route_socket() as codec:
        codec.call(delete_address(index, ip_interface("10.5.0.1/24")))
        assert addresses(codec, index) == []
        codec.call(delete_link(name="d0"))
        assert find_link(codec, name="d0") is None


def test_an_error_names_call_and_subject_and_the_rest_is_done(host: Host) -> None:
    with open_route_socket() as codec:
        lo = find_link(codec, name="lo")
        assert lo is not None
        outcomes = codec.attempt(
            new_address(lo.index, ip_interface("10.5.0.1/32")),
            new_address(lo.index, ip_interface("10.5.0.1/32")),
            new_address(lo.index, ip_interface("10.5.0.2/32")),
        )
        assert isinstance(outcomes[1], KernelError) and outcomes[1].errno == errno.EEXIST
        assert outcomes[1].message.startswith("RTM_NEWADDR 10.5.0.1/32: EEXIST")
        assert {str(a.address.ip) for a in addresses(codec, lo.index)} >= {"10.5.0.1", "10.5.0.2"}
        done, missing = codec.attempt(
            new_address(lo.index, ip_interface("10.5.0.3/32")), delete_link(name="nothing")
        )
        assert done == [] and isinstance(missing, KernelError) and missing.errno == errno.ENODEV
        with pytest.raises(KernelError, match=r"RTM_NEWADDR 10\.5\.0\.1/32: EEXIST"):
            codec.call(new_address(lo.index, ip_interface("10.5.0.1/32")))
        with pytest.raises(KernelError, match="ENETUNREACH"):
            codec.call(
                new_route(ip_network("10.7.0.0/16"), oif=lo.index, gateway=ip_address("192.0.2.99"))
            )
