"""Tests that pods on two nodes reach each other over flannel, whose plugin calls our bridge and
host-local."""

from __future__ import annotations

import signal
from ipaddress import ip_address

import pytest

from cri_server.api import api_pb2 as api
from cri_server.operations.steps import FAILPOINT
from tests.kube.pods import Kube, pod, shell
from tests.kube_nodes import views
from tests.kube_nodes.views import Hosts
from tests.support import cri
from tests.support.processes import wait_until


def test_pods_reach_each_other_both_ways(hosts: Hosts) -> None:
    """Each pod sees the other's address, and packets of all sizes arrive."""
    for node, other in hosts.pairs():
        answer = hosts.fetch(node, f"{hosts.address(other)}/cgi-bin/who")
        assert answer == f"from {hosts.address(node)} at web{other.number}"
        there = hosts.kube.sh(f"web{other.number}", "cut -d' ' -f1 /www/sum")
        fetched = hosts.kube.sh(
            f"web{node.number}",
            f"timeout 20 wget -qO- http://{hosts.address(other)}/big | sha256sum",
        )
        assert fetched.split()[0] == there


def test_pods_reach_each_other_over_ipv6(hosts: Hosts) -> None:
    for node, other in hosts.pairs():
        answer = hosts.fetch(node, f"[{hosts.address6(other)}]:81/cgi-bin/who")
        assert answer == f"from [{hosts.address6(node)}] at web{other.number}"


def test_nodes_reach_pods_of_other_nodes(hosts: Hosts) -> None:
    for node, other in hosts.pairs():
        answer = node.output(
            f"timeout 10 busybox wget -qO- http://{hosts.address(other)}/cgi-bin/who"
        )
        assert f"at web{other.number}" in answer


def test_pods_have_addresses_of_their_nodes_range(hosts: Hosts) -> None:
    ranges = [hosts.subnet(node) for node in hosts.nodes]
    assert not ranges[0].overlaps(ranges[1])
    for node, subnet in zip(hosts.nodes, ranges, strict=True):
        address = ip_address(hosts.address(node))
        assert address in subnet
        assert hosts.pods[node.host]["status"]["hostIP"] == node.address
        assert hosts.addresses(node) <= views.leases(node)


def test_the_kernels_tables_have_the_backends_routes(hosts: Hosts) -> None:
    for node, other in hosts.pairs():
        route = views.routes(node)[str(hosts.subnet(other))]
        if hosts.flannel.backend == "host-gw":
            assert (route["dev"], route["gateway"]) == ("uplink", other.address)
            assert "flannel.1" not in views.link_names(node)
            continue
        (tunnel,) = views.links(other, "flannel.1")
        far_end = str(hosts.subnet(other).network_address)
        assert (route["dev"], route["gateway"]) == ("flannel.1", far_end)
        assert views.forwarding(node, "flannel.1")[tunnel["address"]] == other.address
        assert views.neighbours(node, "flannel.1")[far_end] == tunnel["address"]
        assert tunnel["linkinfo"]["info_data"]["local"] == other.address


def test_packets_use_the_device_of_the_backend(hosts: Hosts) -> None:
    first, second = hosts.nodes
    device = "flannel.1" if hosts.flannel.backend == "vxlan" else "uplink"
    before = [views.links(node, device)[0]["stats64"]["rx"]["bytes"] for node in hosts.nodes]
    hosts.fetch(first, f"{hosts.address(second)}/sum")
    after = [views.links(node, device)[0]["stats64"]["rx"]["bytes"] for node in hosts.nodes]
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_links_of_pods_have_flannels_settings(hosts: Hosts) -> None:
    """Flannel passes these settings to our bridge: the tunnel's MTU, the gateway's address,
    hairpin, and no masquerade."""
    mtu = 1450 if hosts.flannel.backend == "vxlan" else 1500
    for node in hosts.nodes:
        (bridge,) = views.links(node, "cni0")
        gateway = str(hosts.subnet(node).network_address + 1)
        assert (bridge["linkinfo"]["info_kind"], bridge["mtu"]) == ("bridge", mtu)
        assert f"inet {gateway}/24" in node.output("ip addr show dev cni0")
        for port in views.ports(node):
            (veth,) = views.links(node, port)
            assert (veth["mtu"], veth["operstate"]) == (mtu, "UP")
            assert veth["linkinfo"]["info_slave_data"]["hairpin"] is True
        inner = hosts.kube.sh(f"web{node.number}", "cat /sys/class/net/eth0/mtu; ip route")
        assert inner.splitlines()[0] == str(mtu)
        assert f"default via {gateway} dev eth0" in inner


def test_nodes_know_their_own_pods_only(hosts: Hosts) -> None:
    """Each server has its own folders and lists its own pods; the other node's folders are empty in
    its mount namespace."""
    for node, other in hosts.pairs():
        assert node.output(f"ls -A {other.folder}") == ""
        assert "state" in node.output(f"ls -A {node.folder}").split()
        with cri.connect(node.socket) as client:
            names = {
                s.metadata.name
                for s in client.runtime.ListPodSandbox(api.ListPodSandboxRequest()).items
            }
        assert f"web{node.number}" in names
        assert f"web{other.number}" not in names


def test_a_pod_cannot_see_the_other_nodes_files(hosts: Hosts, kube: Kube) -> None:
    first, second = hosts.nodes
    spy = pod(
        "spy",
        shell("ls -A /other; echo end", volumeMounts=[{"name": "v", "mountPath": "/other"}]),
        nodeName=first.host,
        restartPolicy="Never",
        volumes=[{"name": "v", "hostPath": {"path": str(second.folder)}}],
    )
    assert kube.finished(spy)["status"]["phase"] == "Succeeded"
    assert kube.logs("spy") == "end\n"


def test_a_pod_reaches_host_ports_of_the_other_node(hosts: Hosts, kube: Kube) -> None:
    first, second = hosts.nodes
    port = {"containerPort": 80, "hostPort": 18081}
    kube.run(
        pod(
            "hostport",
            shell("mkdir /w; echo through > /w/x; httpd -f -p 80 -h /w", ports=[port]),
            nodeName=second.host,
        )
    )
    assert hosts.fetch(first, f"{second.address}:18081/x") == "through"


def test_a_pod_that_goes_leaves_nothing_and_a_restarted_server_goes_on(
    hosts: Hosts, kube: Kube
) -> None:
    """After kill -9 of one node's server its pods still accept connections. The next server deletes
    a pod that the killed one started, and a new pod can be reached."""
    first, second = hosts.nodes
    gone = kube.run(pod("gone", nodeName=second.host))["status"]["podIP"]
    before = set(views.ports(second))
    second.server.stop(signal.SIGKILL)
    try:
        assert "at web2" in hosts.fetch(first, f"{hosts.address(second)}/cgi-bin/who")
    finally:
        second.start_server()
    kube("delete", "pod", "gone", "--wait=true", "--timeout=60s")
    assert gone not in views.leases(second)
    assert wait_until(lambda: len(before - set(views.ports(second))) == 1, 10)
    new = kube.run(
        pod("new", shell("mkdir /w; echo new > /w/x; httpd -f -p 80 -h /w"), nodeName=second.host)
    )
    assert hosts.fetch(first, f"{new['status']['podIP']}/x") == "new"


@pytest.mark.slow
def test_a_pod_starts_anew_after_the_server_was_killed_in_flannels_add(
    hosts: Hosts, kube: Kube
) -> None:
    """The network device and addresses of the lost sandbox are removed through flannel; kubelet's
    next attempt gets others."""
    node = hosts.nodes[1]
    before = len(views.ports(node))
    node.server.stop()
    node.start_server(environment={FAILPOINT: "run_sandbox.network=kill"})
    kube.apply(pod("victim", nodeName=node.host))
    assert wait_until(lambda: not node.server.pid, 30)
    lost = views.leases(node)
    node.start_server()
    address = kube.ready("victim")["status"]["podIP"]
    assert wait_until(lambda: len(views.ports(node)) == before + 1, 10)
    leases = views.leases(node)
    assert address in leases
    assert len(leases) == 2 * (before + 1)
    assert len(lost - leases) == 2
