"""The portmap plugin: the clients that reach a pod through a host port, and the state after the
port is closed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from cni_plugins.net import conntrack, netns
from tests.kernel.cni.harness import (
    BRIDGE,
    CLIENT,
    CLIENT6,
    HOST_OUTER,
    HOST_OUTER6,
    PORTMAP,
    Host,
    Pod,
    Refused,
    addresses_of,
    all_elements,
    attach,
    call,
    listen,
    nft,
    portmap_config,
    reach,
    read_sysctl,
    unreachable,
)

WEB = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}


def publish(host: Host, pod: Pod, *mappings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Attach a pod and open its ports; returns the portmap plugin's input."""
    config = portmap_config(
        attach(pod, host.bridge_config(isDefaultGateway=True, ipMasq=True, hairpinMode=True)),
        *mappings,
        **changes,
    )
    assert call(PORTMAP, "ADD", pod, config) == config["prevResult"]
    return config


@pytest.fixture
def net(host: Host) -> Iterator[Host]:
    host.connect_outside()
    yield host


@pytest.mark.parametrize(
    ("bind", "address", "client"), [("0.0.0.0", HOST_OUTER, CLIENT), ("::", HOST_OUTER6, CLIENT6)]
)
@pytest.mark.parametrize(
    ("protocol", "kind"), [("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)]
)
def test_a_pod_sees_the_address_of_a_client_outside(
    net: Host, protocol: str, kind: int, bind: str, address: str, client: str
) -> None:
    pod = net.pod()
    publish(net, pod, {**WEB, "protocol": protocol})
    with listen(pod.fd, bind, 80, kind) as server:
        assert reach(net.outside, address, 8080, server) == client


@pytest.mark.parametrize(
    ("bind", "address"), [("0.0.0.0", HOST_OUTER), ("::", HOST_OUTER6), ("0.0.0.0", "10.88.0.1")]
)
def test_the_host_reaches_a_pod_by_its_own_address(net: Host, bind: str, address: str) -> None:
    pod = net.pod()
    publish(net, pod, WEB)
    with listen(pod.fd, bind, 80) as server:
        reach(None, address, 8080, server)


@pytest.mark.parametrize(
    ("protocol", "kind"), [("tcp", socket.SOCK_STREAM), ("udp", socket.SOCK_DGRAM)]
)
def test_the_host_reaches_a_port_through_loopback(net: Host, protocol: str, kind: int) -> None:
    pod = net.pod()
    publish(net, pod, {**WEB, "protocol": protocol})
    with listen(pod.fd, "0.0.0.0", 80, kind) as server:
        assert reach(None, "127.0.0.1", 8080, server) == "10.88.0.1"


def test_ipv6_loopback_is_refused_at_once(net: Host) -> None:
    """A client that tries a host port at ::1 first is refused, and need not wait before it tries
    127.0.0.1."""
    pod = net.pod()
    publish(net, pod, WEB)
    # A host port cannot be reached at ::1, because the kernel has no route_localnet for IPv6.
    with listen(pod.fd, "::", 80) as server, pytest.raises(ConnectionRefusedError):
        reach(None, "::1", 8080, server)
    previous = attach(net.pod(), net.bridge_config())
    with pytest.raises(Refused, match="::1"):
        call(PORTMAP, "ADD", net.pods[-1], portmap_config(previous, {**WEB, "hostIP": "::1"}))
    scoped = portmap_config(previous, {**WEB, "hostIP": "::1"}) | {"args": {"cni": {"scope": "s"}}}
    call(PORTMAP, "DEL", net.pods[-1], scoped)  # as our server undoes what was refused


@pytest.mark.parametrize(("bind", "address"), [("0.0.0.0", HOST_OUTER), ("::", HOST_OUTER6)])
def test_a_pod_and_its_neighbour_reach_the_host_port_of_the_pod(
    net: Host, bind: str, address: str
) -> None:
    pod, neighbour = net.pod(), net.pod()
    publish(net, pod, WEB)
    attach(neighbour, net.bridge_config(isDefaultGateway=True, ipMasq=True))
    with listen(pod.fd, bind, 80) as server:
        assert reach(pod.fd, address, 8080, server) in ("10.88.0.1", "fd88::1")
        assert reach(neighbour.fd, address, 8080, server) in ("10.88.0.1", "fd88::1")


def test_without_snat_the_neighbour_is_not_masqueraded(net: Host) -> None:
    pod = net.pod()
    publish(net, pod, WEB, snat=False)
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(net.outside, HOST_OUTER, 8080, server) == CLIENT
        assert unreachable(lambda: reach(None, "127.0.0.1", 8080, server))
    assert read_sysctl("net/ipv4/conf/cni0/route_localnet") == "0"


def test_all_clients_can_be_masqueraded(net: Host) -> None:
    pod = net.pod()
    publish(net, pod, WEB, masqAll=True)
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(net.outside, HOST_OUTER, 8080, server) == "10.88.0.1"


def test_only_the_named_host_address_leads_to_the_pod(net: Host) -> None:
    one, other = net.pod(), net.pod()
    with IPRoute() as route:
        route.addr(
            "add", index=route.link_lookup(ifname="outer")[0], address="192.0.2.3", prefixlen=24
        )
    publish(net, one, {**WEB, "hostIP": HOST_OUTER})
    with listen(one.fd, "0.0.0.0", 80) as server:
        assert reach(net.outside, HOST_OUTER, 8080, server) == CLIENT
        assert unreachable(lambda: reach(net.outside, "192.0.2.3", 8080, server))
        assert unreachable(lambda: reach(net.outside, HOST_OUTER6, 8080, server))
    publish(net, other, {**WEB, "hostIP": "192.0.2.3"})
    with listen(other.fd, "0.0.0.0", 80) as server:
        assert reach(net.outside, "192.0.2.3", 8080, server) == CLIENT


def test_a_port_on_loopback_is_reached_from_the_host_only(net: Host) -> None:
    pod = net.pod()
    publish(net, pod, {**WEB, "hostIP": "127.0.0.1"})
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(None, "127.0.0.1", 8080, server) == "10.88.0.1"
        assert unreachable(lambda: reach(net.outside, HOST_OUTER, 8080, server))


@pytest.mark.parametrize(("host_ip", "families"), [("0.0.0.0", {4}), ("::", {6}), ("", {4, 6})])
def test_an_unspecified_host_address_means_its_family(
    net: Host, host_ip: str, families: set[int]
) -> None:
    publish(net, net.pod(), {**WEB, "hostIP": host_ip})
    assert {
        int(e.set_name[-1]) for e in all_elements() if e.set_name.startswith("ports")
    } == families


def test_sctp_ports_get_rules(net: Host) -> None:
    publish(net, net.pod(), {**WEB, "protocol": "sctp"})
    assert "sctp . 8080" in nft("list", "map", "inet", "pyrunc_cni", "ports4")


def test_others_cannot_use_the_hosts_loopback(net: Host) -> None:
    """CVE-2020-8558: a neighbour sends to 127.0.0.1 of a host with route_localnet. The plugin's
    rules drop the packet."""
    pod = net.pod()
    publish(net, pod, WEB)
    with IPRoute() as route:
        (index,) = route.link_lookup(ifname="outer")
    assert netns.write_sysctl("net/ipv4/conf/outer/route_localnet", "1") and index
    with netns.entered(net.outside), IPRoute() as route:
        route.addr("del", index=route.link_lookup(ifname="lo")[0], address="127.0.0.1", prefixlen=8)
        netns.write_sysctl("net/ipv4/conf/eth0/route_localnet", "1")
        route.route("add", dst="127.0.0.1/32", gateway=HOST_OUTER)
    with listen_here("127.0.0.1", 9999) as server, attacker(net) as client:
        client.sendto(b"hello", ("127.0.0.1", 9999))
        with pytest.raises(TimeoutError):
            server.recv(10)
        nft("delete", "table", "inet", "pyrunc_cni")
        server.settimeout(20)
        client.sendto(b"hello", ("127.0.0.1", 9999))
        assert server.recv(10) == b"hello"  # the attack is real without the guard


def listen_here(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.settimeout(0.5)
    listener.bind((address, port))
    return listener


def attacker(net: Host) -> socket.socket:
    with netns.entered(net.outside):
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def test_a_taken_port_is_refused_with_its_owner_and_nothing_is_changed(net: Host) -> None:
    one, two = net.pod(), net.pod()
    publish(net, one, WEB)
    before = set(all_elements())
    config = net.bridge_config(isDefaultGateway=True)
    previous = attach(two, config)
    with pytest.raises(Refused, match=r"host port 8080/tcp is already taken by net/pod0/eth0"):
        call(PORTMAP, "ADD", two, portmap_config(previous, {**WEB, "hostPort": 8081}, WEB))
    assert set(all_elements()) == before


def test_del_closes_the_ports_of_the_pod_alone(net: Host) -> None:
    one, two = net.pod(), net.pod()
    config = publish(net, one, WEB, {**WEB, "hostPort": 8053, "protocol": "udp"})
    publish(net, two, {**WEB, "hostPort": 9090})
    for _ in range(2):
        call(PORTMAP, "DEL", one, config)
    with listen(two.fd, "0.0.0.0", 80) as server:
        assert reach(net.outside, HOST_OUTER, 9090, server) == CLIENT
    assert {e.comment for e in all_elements() if "masquerade" not in e.set_name} == {
        "net/pod1/eth0"
    }


def test_del_needs_neither_the_mappings_nor_the_result_nor_the_namespace(net: Host) -> None:
    pod = net.pod()
    config = publish(net, pod, WEB)
    del config["runtimeConfig"], config["prevResult"]
    pod.close()
    call(PORTMAP, "DEL", pod, config, netns_path="")
    assert [e for e in all_elements() if "masquerade" not in e.set_name] == []


def test_a_udp_flow_follows_the_port_to_its_new_pod(net: Host) -> None:
    old, new = net.pod(), net.pod()
    mapping = {**WEB, "protocol": "udp"}
    config = publish(net, old, mapping)
    with netns.entered(net.outside):
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with client, listen(old.fd, "0.0.0.0", 80, socket.SOCK_DGRAM) as first:
        client.settimeout(20)
        client.connect((HOST_OUTER, 8080))
        client.send(b"one")
        assert first.recv(10) == b"one"
        call(PORTMAP, "DEL", old, config)
        publish(net, new, mapping)
        with listen(new.fd, "0.0.0.0", 80, socket.SOCK_DGRAM) as second:
            client.send(b"two")
            assert second.recv(10) == b"two"


def test_ports_open_and_close_where_flows_cannot_be_deleted(
    net: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ports open and close although the kernel has no nf_conntrack_netlink and answers EINVAL."""

    def refuse(ports: Collection[int]) -> int:
        raise NetlinkError(errno.EINVAL)

    monkeypatch.setattr(conntrack, "drop_udp_flows", refuse)
    pod = net.pod()
    config = publish(net, pod, {**WEB, "protocol": "udp"})
    assert [e.set_name for e in all_elements() if "masquerade" not in e.set_name]
    call(PORTMAP, "DEL", pod, config)
    assert [e for e in all_elements() if "masquerade" not in e.set_name] == []
    assert capsys.readouterr().err.count("cannot delete UDP flows: (22,") == 2


def test_check_notices_lost_elements_and_rules(net: Host) -> None:
    pod = net.pod()
    config = publish(net, pod, WEB)
    call(PORTMAP, "CHECK", pod, config)
    nft("delete", "element", "inet", "pyrunc_cni", "ports4", "{ tcp . 8080 }")
    with pytest.raises(Refused, match="8080/tcp") as refused:
        call(PORTMAP, "CHECK", pod, config)
    assert refused.value.code == 120
    nft("add", "element", "inet", "pyrunc_cni", "ports4", "{ tcp . 8080 : 10.88.0.99 . 80 }")
    with pytest.raises(Refused, match="8080/tcp"):
        call(PORTMAP, "CHECK", pod, config)
    nft("flush", "chain", "inet", "pyrunc_cni", "to_pod")
    with pytest.raises(Refused, match="rules"):
        call(PORTMAP, "CHECK", pod, config)


def test_gc_closes_ports_of_invalid_attachments(net: Host) -> None:
    one, two = net.pod(), net.pod()
    publish(net, one, WEB)
    config = publish(net, two, {**WEB, "hostPort": 9090})
    call(
        PORTMAP,
        "GC",
        two,
        {**config, "cni.dev/valid-attachments": [{"containerID": "pod1", "ifname": "eth0"}]},
    )
    assert {e.comment for e in all_elements() if e.set_name.startswith("ports")} == {
        "net/pod1/eth0"
    }


def test_without_mappings_nothing_is_changed(net: Host) -> None:
    pod = net.pod()
    result = attach(pod, net.bridge_config())
    assert call(PORTMAP, "ADD", pod, portmap_config(result)) == result
    assert (
        call(PORTMAP, "ADD", pod, portmap_config(result, {"hostPort": 0, "containerPort": 80}))
        == result
    )
    assert all_elements() == []


def test_a_thousand_ports_are_added_in_a_single_transaction(net: Host) -> None:
    pod = net.pod()
    config = publish(net, pod, *({**WEB, "hostPort": 10000 + n} for n in range(1000)))
    assert len([e for e in all_elements() if e.set_name == "ports4"]) == 1000
    call(PORTMAP, "CHECK", pod, config)
    call(PORTMAP, "DEL", pod, config)
    assert [e for e in all_elements() if e.set_name.startswith(("ports", "near"))] == []


@pytest.mark.parametrize(
    "mapping",
    [
        {**WEB, "protocol": "icmp"},
        {**WEB, "hostPort": 70000},
        {**WEB, "hostPort": "8080"},
        {**WEB, "containerPort": 0},
        {**WEB, "hostIP": "example.org"},
        "8080:80",
    ],
)
def test_an_invalid_mapping_is_refused(net: Host, mapping: Any) -> None:
    pod = net.pod()
    previous = attach(pod, net.bridge_config())
    with pytest.raises(Refused) as refused:
        call(PORTMAP, "ADD", pod, portmap_config(previous, mapping))
    assert refused.value.code == 7


def test_conditions_are_refused_rather_than_ignored(net: Host) -> None:
    pod = net.pod()
    previous = attach(pod, net.bridge_config())
    with pytest.raises(Refused, match="conditionsV4") as refused:
        call(PORTMAP, "ADD", pod, portmap_config(previous, WEB, conditionsV4=["-s", "10.0.0.0/8"]))
    assert refused.value.code == 2


def test_portmap_alone_is_refused(net: Host) -> None:
    config = portmap_config(None, WEB)
    with pytest.raises(Refused, match="must follow a plugin"):
        call(PORTMAP, "ADD", net.pod(), config)


def test_single_stack_pods_get_ports_of_their_family(net: Host) -> None:
    pod = net.pod()
    previous = attach(pod, net.bridge_config(ipam=net.ipam("10.88.0.0/16")))
    call(PORTMAP, "ADD", pod, portmap_config(previous, WEB))
    assert {e.set_name for e in all_elements()} == {"ports4", "near4"}
    assert addresses_of(previous) == ["10.88.0.2"]
    call(BRIDGE, "DEL", pod, net.bridge_config())
