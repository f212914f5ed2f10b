"""The bridge plugin: the effects of ADD by option, of DEL and GC, and the damage that CHECK
detects."""

from __future__ import annotations

import os
import socket
import time
from ipaddress import ip_interface
from typing import Any

import pytest
from pyroute2 import IPRoute

from cni_plugins.net import netns
from tests.kernel.cni.harness import (
    BRIDGE,
    LOOPBACK,
    Host,
    Pod,
    Refused,
    addresses_of,
    all_elements,
    attach,
    call,
    find_link,
    link_names,
    listen,
    nft,
    nothing_was_lost,
    reach,
    read_sysctl,
    unreachable,
)


def addresses_on(name: str) -> set[str]:
    with IPRoute() as route:
        index = route.link_lookup(ifname=name)[0]
        return {
            f"{a.get_attr('IFA_ADDRESS')}/{a['prefixlen']}" for a in route.get_addr(index=index)
        }


def port_of(result: Any) -> str:
    return str(result["interfaces"][1]["name"])


def test_a_pod_gets_the_addresses_and_routes_of_the_result(host: Host) -> None:
    pod = host.pod()
    result = attach(pod, host.bridge_config(isDefaultGateway=True))
    assert addresses_of(result) == ["10.88.0.2", "fd88::2"]
    bridge, port, inner = result["interfaces"]
    assert bridge["mac"] == find_link("cni0").get_attr("IFLA_ADDRESS")
    assert port["mac"] == find_link(port["name"]).get_attr("IFLA_ADDRESS")
    assert "sandbox" not in bridge and inner["sandbox"] == pod.path
    assert {"10.88.0.1/16", "fd88::1/64"} <= addresses_on("cni0")
    with netns.entered(pod.fd):
        assert find_link("eth0").get_attr("IFLA_ADDRESS") == inner["mac"] == "0a:58:0a:58:00:02"
        assert {"10.88.0.2/16", "fd88::2/64"} <= addresses_on("eth0")
        with IPRoute() as route:
            gateways = {
                r.get_attr("RTA_GATEWAY")
                for r in route.get_routes()
                if r["dst_len"] == 0 and r.get_attr("RTA_GATEWAY")
            }
    assert gateways == {"10.88.0.1", "fd88::1"}
    assert find_link(port["name"]).get_attr("IFLA_MASTER") == find_link("cni0")["index"]


def test_pods_and_host_reach_each_other_at_once(host: Host) -> None:
    one, two = host.pod(), host.pod()
    first, second = attach(one, host.bridge_config()), attach(two, host.bridge_config())
    for index, bind in ((0, "0.0.0.0"), (1, "::")):
        with listen(two.fd, bind, 80) as server:
            target = addresses_of(second)[index]
            assert reach(one.fd, target, 80, server) == addresses_of(first)[index]
            assert reach(None, target, 80, server) in ("10.88.0.1", "fd88::1")


def test_an_ipv6_address_is_usable_without_waiting_for_duplicates(host: Host) -> None:
    pod = host.pod()
    attach(pod, host.bridge_config())
    with netns.entered(pod.fd), IPRoute() as route:
        index = route.link_lookup(ifname="eth0")[0]
        flags = [
            a.get_attr("IFA_FLAGS") or a["flags"]
            for a in route.get_addr(index=index, family=socket.AF_INET6)
        ]
    assert flags and not any(f & 0x40 for f in flags)


def test_duplicate_addresses_are_detected_with_enabledad(host: Host) -> None:
    pod = host.pod()
    started = time.monotonic()
    attach(pod, host.bridge_config(enabledad=True))
    assert time.monotonic() - started > 0.5
    assert len(call(BRIDGE, "ADD", host.pod(), host.bridge_config())["ips"]) == 2


def test_masquerade_hides_pods_from_outside_but_not_from_each_other(host: Host) -> None:
    host.connect_outside()
    one, two, plain = host.pod(), host.pod(), host.pod()
    config = host.bridge_config(isDefaultGateway=True, ipMasq=True)
    first, second = attach(one, config), attach(two, config)
    with listen(host.outside, "0.0.0.0", 80) as server, listen(host.outside, "::", 81) as server6:
        assert reach(one.fd, "192.0.2.2", 80, server) == "192.0.2.1"
        assert reach(one.fd, "2001:db8::2", 81, server6) == "2001:db8::1"
    with listen(two.fd, "0.0.0.0", 80) as server:
        assert reach(one.fd, addresses_of(second)[0], 80, server) == addresses_of(first)[0]
    attach(plain, host.bridge_config(isDefaultGateway=True))
    with listen(host.outside, "0.0.0.0", 80) as server:
        # no host outside has a route to 10.88.0.0/16
        assert unreachable(lambda: reach(plain.fd, "192.0.2.2", 80, server))


def test_hairpin_lets_a_pod_reach_itself_through_the_bridge(host: Host) -> None:
    off, on = host.pod(), host.pod()
    assert not hairpin(port_of(attach(off, host.bridge_config())))
    assert hairpin(port_of(attach(on, host.bridge_config(hairpinMode=True))))


def hairpin(name: str) -> bool:
    data = find_link(name).get_attr("IFLA_LINKINFO").get_attr("IFLA_INFO_SLAVE_DATA")
    return bool(data.get_attr("IFLA_BRPORT_MODE"))


def test_isolated_ports_reach_the_host_only(host: Host) -> None:
    one, two = host.pod(), host.pod()
    attach(one, host.bridge_config(portIsolation=True))
    second = attach(two, host.bridge_config(portIsolation=True))
    with listen(two.fd, "0.0.0.0", 80) as server:
        assert unreachable(lambda: reach(one.fd, addresses_of(second)[0], 80, server))
        assert reach(None, addresses_of(second)[0], 80, server) == "10.88.0.1"


def test_the_bridge_can_be_promiscuous(host: Host) -> None:
    attach(host.pod(), host.bridge_config(promiscMode=True))
    assert find_link("cni0")["flags"] & 0x100


def test_the_mtu_applies_to_the_bridge_and_both_ends(host: Host) -> None:
    pod = host.pod()
    result = attach(pod, host.bridge_config(mtu=1400))
    assert (
        find_link("cni0").get_attr("IFLA_MTU")
        == find_link(port_of(result)).get_attr("IFLA_MTU")
        == 1400
    )
    with netns.entered(pod.fd):
        assert find_link("eth0").get_attr("IFLA_MTU") == 1400
    assert [i["mtu"] for i in result["interfaces"]] == [1400, 1400, 1400]


@pytest.mark.parametrize(
    ("changes", "args"),
    [
        ({"runtimeConfig": {"mac": "02:00:00:00:00:07"}}, ""),
        ({"args": {"cni": {"mac": "02-00-00-00-00-07"}}}, ""),
        ({}, "MAC=02:00:00:00:00:07"),
    ],
)
def test_a_requested_hardware_address_is_used(
    host: Host, changes: dict[str, Any], args: str
) -> None:
    result = attach(host.pod(), host.bridge_config(**changes), args=args)
    assert result["interfaces"][2]["mac"] == "02:00:00:00:00:07"


def test_a_bridge_with_another_address_is_refused_or_forced(host: Host) -> None:
    attach(host.pod(), host.bridge_config())
    other = host.bridge_config(name="other", ipam=host.ipam("10.99.0.0/16"))
    with pytest.raises(Refused, match="forceAddress"):
        attach(host.pod(), other)
    attach(host.pod(), {**other, "forceAddress": True})
    assert "10.99.0.1/16" in addresses_on("cni0")
    assert "10.88.0.1/16" not in addresses_on("cni0")
    assert "fd88::1/64" in addresses_on("cni0")


def test_a_link_of_another_kind_is_not_taken_for_a_bridge(host: Host) -> None:
    with pytest.raises(Refused, match="not a bridge"):
        attach(host.pod(), host.bridge_config(bridge="lo"))


def test_a_network_can_have_no_addresses(host: Host) -> None:
    config = host.bridge_config(isGateway=False)
    del config["ipam"]
    pod = host.pod()
    result = attach(pod, config)
    assert "ips" not in result
    with netns.entered(pod.fd):
        assert find_link("eth0")["flags"] & 1


def test_disable_container_interface_leaves_the_interface_down(host: Host) -> None:
    config = host.bridge_config(isGateway=False, disableContainerInterface=True)
    with pytest.raises(Refused, match="disableContainerInterface"):
        attach(host.pod(), config)
    del config["ipam"]
    pod = host.pod()
    attach(pod, config)
    with netns.entered(pod.fd):
        assert not find_link("eth0")["flags"] & 1


def test_unsupported_options_are_refused_by_name(host: Host) -> None:
    with pytest.raises(Refused, match="vlan") as refused:
        attach(host.pod(), host.bridge_config(vlan=7))
    assert refused.value.code == 2
    assert link_names() == {"lo"}


def test_routes_have_their_mtu_priority_and_table(host: Host) -> None:
    routes = [
        {"dst": "10.1.0.0/16", "gw": "10.88.0.9", "mtu": 1300, "priority": 77, "table": 300},
        {"dst": "0.0.0.0/0"},
    ]
    pod = host.pod()
    result = attach(pod, host.bridge_config(ipam=host.ipam("10.88.0.0/16", routes=routes)))
    assert result["routes"][0] == {
        "dst": "10.1.0.0/16",
        "gw": "10.88.0.9",
        "mtu": 1300,
        "priority": 77,
        "table": 300,
    }
    with netns.entered(pod.fd), IPRoute() as route:
        message = next(
            r
            for r in route.get_routes(family=socket.AF_INET)
            if r.get_attr("RTA_DST") == "10.1.0.0"
        )
    assert message.get_attr("RTA_GATEWAY") == "10.88.0.9" and message.get_attr("RTA_TABLE") == 300
    assert (
        message.get_attr("RTA_PRIORITY") == 77
        and message.get_attr("RTA_METRICS").get_attr("RTAX_MTU") == 1300
    )


def test_forwarding_is_switched_on_for_a_gateway_only(host: Host) -> None:
    attach(host.pod(), host.bridge_config(isGateway=False))
    assert read_sysctl("net/ipv4/ip_forward") == "0"
    attach(host.pod(), host.bridge_config())
    assert read_sysctl("net/ipv4/ip_forward") == read_sysctl("net/ipv6/conf/all/forwarding") == "1"
    assert read_sysctl("net/ipv6/conf/cni0/accept_ra") == "0"


def test_del_removes_everything_and_may_be_repeated(host: Host) -> None:
    pod = host.pod()
    config = host.bridge_config(ipMasq=True)
    result = attach(pod, config)
    assert len(all_elements()) == 2
    for _ in range(2):
        call(BRIDGE, "DEL", pod, {**config, "prevResult": result})
        assert link_names() == {"lo", "cni0"}
        assert all_elements() == []
        assert leases(host) == set()
    with netns.entered(pod.fd):
        assert link_names() == {"lo"}


def test_del_succeeds_without_result_and_without_namespace(host: Host) -> None:
    pod = host.pod()
    config = host.bridge_config(ipMasq=True)
    attach(pod, config)
    pod.close()
    call(BRIDGE, "DEL", pod, config, netns_path="")
    assert link_names() == {"lo", "cni0"} and all_elements() == [] and leases(host) == set()


def test_del_does_not_touch_another_pod(host: Host) -> None:
    one, two = host.pod(), host.pod()
    config = host.bridge_config(ipMasq=True)
    attach(one, config)
    result = attach(two, config)
    call(BRIDGE, "DEL", one, {**config, "prevResult": result})  # a confused runtime's result
    assert {e.comment for e in all_elements()} == {"net/pod1/eth0"}
    call(BRIDGE, "CHECK", two, {**config, "prevResult": result})


def test_background_teardown_stops_packets_at_once_and_ends_with_the_namespace(
    host: Host,
) -> None:
    one, two = host.pod(), host.pod()
    config = host.bridge_config(ipMasq=True)
    first = attach(one, config)
    attach(two, config)
    with listen(one.fd, "0.0.0.0", 80) as server:
        started = time.monotonic()
        call(
            BRIDGE,
            "DEL",
            one,
            {**config, "prevResult": first, "args": {"cni": {"teardown": "background"}}},
        )
        took_s = time.monotonic() - started
        assert unreachable(lambda: reach(two.fd, addresses_of(first)[0], 80, server))
    assert len(all_elements()) == 2
    one.close()
    assert took_s < 10
    wait_until(lambda: port_of(first) not in link_names())


def test_an_address_is_not_reused_before_its_veth_is_gone(host: Host) -> None:
    config = host.bridge_config(ipam=host.ipam("10.88.0.0/29"))  # .2 to .6
    pods = [host.pod() for _ in range(5)]
    results = [attach(pod, config) for pod in pods]
    with pytest.raises(Refused, match="no address left") as refused:
        attach(host.pod(), config)
    assert refused.value.code == 110
    call(
        BRIDGE,
        "DEL",
        pods[2],
        {**config, "prevResult": results[2], "args": {"cni": {"teardown": "background"}}},
    )
    late = host.pod()
    with pytest.raises(Refused, match="previous interface") as refused:
        attach(late, config)
    assert refused.value.code == 11
    pods[2].close()
    assert addresses_of(attach(late, config)) == addresses_of(results[2])


def test_no_first_packet_is_lost(host: Host) -> None:
    """When ADD returns, the bridge forwards packets and the pod's addresses are usable: a lost
    packet would cost a second."""
    neighbour = host.pod("neighbour")
    attach(neighbour, host.bridge_config())
    for number in range(12):
        pod = host.pod(f"n{number}")
        result = attach(pod, host.bridge_config())
        for bind, address in zip(("0.0.0.0", "::"), addresses_of(result), strict=True):
            with listen(pod.fd, bind, 80) as server:
                reach(
                    neighbour.fd if number % 2 else None, address, 80, server, look=nothing_was_lost
                )


def test_an_address_with_another_hardware_address_is_known_at_once(host: Host) -> None:
    """Neighbours that know the old pod's hardware address get the new one in an advertisement, and
    need not wait until their entry is stale."""
    config = host.bridge_config(capabilities={"ips": True})
    neighbour = host.pod("neighbour")
    attach(neighbour, config)
    macs = []
    for number in range(3):
        pod = host.pod(f"n{number}")
        ips = [f"10.88.7.{number + 1}", "fd88::77"]
        result = attach(pod, {**config, "runtimeConfig": {"ips": ips}})
        macs.append(result["interfaces"][2]["mac"])
        for source in (None, neighbour.fd):
            with listen(pod.fd, "::", 80) as server:
                reach(source, "fd88::77", 80, server, look=nothing_was_lost)
        call(BRIDGE, "DEL", pod, {**config, "prevResult": result})
    assert len(set(macs)) == 3


def test_add_succeeds_again_after_a_background_teardown(host: Host) -> None:
    pod, config = host.pod(), host.bridge_config()
    attach(pod, config)
    call(BRIDGE, "DEL", pod, {**config, "args": {"cni": {"teardown": "background"}}})
    assert addresses_of(attach(pod, config)) == ["10.88.0.3", "fd88::3"]


def test_add_twice_is_refused_and_leaves_the_first_alone(host: Host) -> None:
    pod, config = host.pod(), host.bridge_config(ipMasq=True)
    result = attach(pod, config)
    with pytest.raises(Refused, match="already"):
        attach(pod, config)
    call(BRIDGE, "CHECK", pod, {**config, "prevResult": result})


def test_a_failed_add_leaves_nothing(host: Host) -> None:
    routes = [{"dst": "10.1.0.0/16", "gw": "172.31.0.1"}]  # an unreachable gateway
    with pytest.raises(Refused, match=r"10.1.0.0/16 via 172.31.0.1: ENETUNREACH"):
        attach(
            host.pod(),
            host.bridge_config(ipMasq=True, ipam=host.ipam("10.88.0.0/16", routes=routes)),
        )
    assert link_names() == {"lo", "cni0"} and leases(host) == set() and all_elements() == []


def _link_down(host: Host, pod: Pod, result: Any) -> None:
    with IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=port_of(result))[0], state="down")


def _bridge_gone(host: Host, pod: Pod, result: Any) -> None:
    with IPRoute() as route:
        route.link("del", index=route.link_lookup(ifname="cni0")[0])


def _off_the_bridge(host: Host, pod: Pod, result: Any) -> None:
    with IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=port_of(result))[0], master=0)


def _address_gone(host: Host, pod: Pod, result: Any) -> None:
    with netns.entered(pod.fd), IPRoute() as route:
        route.addr(
            "del", index=route.link_lookup(ifname="eth0")[0], address="10.88.0.2", prefixlen=16
        )


def _route_gone(host: Host, pod: Pod, result: Any) -> None:
    with netns.entered(pod.fd), IPRoute() as route:
        route.route("del", dst="default", gateway="10.88.0.1")


def _gateway_gone(host: Host, pod: Pod, result: Any) -> None:
    with IPRoute() as route:
        route.addr(
            "del", index=route.link_lookup(ifname="cni0")[0], address="10.88.0.1", prefixlen=16
        )


def _other_mac(host: Host, pod: Pod, result: Any) -> None:
    with netns.entered(pod.fd), IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname="eth0")[0], address="02:00:00:00:00:01")


def _lease_gone(host: Host, pod: Pod, result: Any) -> None:
    os.unlink(f"{host.folder}/leases/net/10.88.0.2")


def _table_gone(host: Host, pod: Pod, result: Any) -> None:
    nft("flush", "ruleset")


def _rules_gone(host: Host, pod: Pod, result: Any) -> None:
    nft("flush", "chain", "inet", "pyrunc_cni", "from_pod")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_link_down, "is down"),
        (_bridge_gone, "bridge cni0 is gone"),
        (_off_the_bridge, "not on cni0"),
        (_address_gone, "has lost 10.88.0.2/16"),
        (_route_gone, "route to 0.0.0.0/0"),
        (_gateway_gone, "cni0 has lost 10.88.0.1"),
        (_other_mac, "hardware address"),
        (_lease_gone, "10.88.0.2 is not leased"),
        (_table_gone, "table"),
        (_rules_gone, "table"),
    ],
)
def test_check_notices_damage(host: Host, damage: Any, sentence: str) -> None:
    pod = host.pod()
    config = host.bridge_config(isDefaultGateway=True, ipMasq=True, hairpinMode=True)
    result = attach(pod, config)
    with_result = {**config, "prevResult": result}
    call(BRIDGE, "CHECK", pod, with_result)
    damage(host, pod, result)
    with pytest.raises(Refused, match=sentence) as refused:
        call(BRIDGE, "CHECK", pod, with_result)
    assert refused.value.code == 120
    call(BRIDGE, "DEL", pod, with_result)  # damaged or not, it can be removed
    assert leases(host) == set()


def test_gc_removes_addresses_and_rules_without_a_valid_attachment(host: Host) -> None:
    config = host.bridge_config(ipMasq=True)
    other = host.bridge_config(name="other", bridge="cni1", ipam=host.ipam("10.99.0.0/16"))
    keep, lose, foreign = host.pod(), host.pod(), host.pod()
    result = attach(keep, config)
    lost = attach(lose, config)
    elsewhere = attach(foreign, {**other, "ipMasq": True})
    valid = [{"containerID": keep.id, "ifname": "eth0"}]
    call(BRIDGE, "GC", keep, {**config, "cni.dev/valid-attachments": valid})
    assert (
        port_of(result) in link_names()
        and port_of(elsewhere) in link_names()
        and port_of(lost) not in link_names()
    )
    assert {e.comment for e in all_elements()} == {"net/pod0/eth0", "other/pod2/eth0"}
    assert leases(host) == {"10.88.0.2", "fd88::2"}


def test_gc_without_a_list_is_refused(host: Host) -> None:
    with pytest.raises(Refused, match="valid-attachments"):
        call(BRIDGE, "GC", host.pod(), host.bridge_config())


@pytest.mark.parametrize("path", ["/proc/self/ns/uts", "/dev/null", "/nowhere", "/"])
def test_a_path_that_is_no_network_namespace_is_refused(host: Host, path: str) -> None:
    with pytest.raises(Refused) as refused:
        call(BRIDGE, "ADD", host.pod(), host.bridge_config(), netns_path=path)
    assert refused.value.code == 3
    assert leases(host) == set()


def test_a_namespace_by_path_is_accepted(host: Host) -> None:
    pod = host.pod()
    child = os.fork()
    if child == 0:
        with netns.entered(pod.fd):
            time.sleep(100)
        os._exit(0)
    try:
        wait_until(lambda: os.stat(f"/proc/{child}/ns/net").st_ino == os.fstat(pod.fd).st_ino)
        result = call(BRIDGE, "ADD", pod, host.bridge_config(), netns_path=f"/proc/{child}/ns/net")
        assert result["interfaces"][2]["sandbox"] == f"/proc/{child}/ns/net"
        with netns.entered(pod.fd):
            assert "eth0" in link_names()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_loopback_is_set_up(host: Host) -> None:
    pod = host.pod()
    config = {"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}
    with pytest.raises(Refused, match="not up"):
        call(LOOPBACK, "CHECK", pod, config)
    result = call(LOOPBACK, "ADD", pod, config)
    assert [entry["address"] for entry in result["ips"]] == ["127.0.0.1/8", "::1/128"]
    call(LOOPBACK, "CHECK", pod, config)
    with netns.entered(pod.fd):
        assert find_link("lo")["flags"] & 1
    call(LOOPBACK, "DEL", pod, config)
    call(LOOPBACK, "DEL", pod, config, netns_path="/nowhere")


def leases(host: Host) -> set[str]:
    folder = f"{host.folder}/leases/net"
    names = set()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            names.add(str(ip_interface(name).ip))
        except ValueError:
            continue
    return names


def wait_until(true: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
