"""Tests host ports, the pod's addresses, resolver configuration, and hostname."""

from __future__ import annotations

import socket
import subprocess
from ipaddress import ip_address, ip_network

from tests.kube.pods import SERVING, Kube, pod, shell
from tests.support.cluster import NODE_IP
from tests.support.cluster_node import POD_SUBNETS


def test_host_ports_are_reached_from_outside_and_from_the_node(kube: Kube) -> None:
    ports = [
        {"containerPort": 80, "hostPort": 18080},
        {"containerPort": 5353, "hostPort": 15353, "protocol": "UDP"},
    ]
    kube.run(
        pod(
            "p",
            {**SERVING, "ports": ports},
            shell("while true; do echo udp-answer | nc -u -l -p 5353 -w 2; done"),
        )
    )
    with socket.create_connection((NODE_IP, 18080), timeout=30) as outside:
        outside.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"200 OK" in outside.recv(4096)
    for address in ("127.0.0.1", NODE_IP):
        inside = kube.cluster.node.inside("busybox", "wget", "-qO-", f"http://{address}:18080/")
        assert b"Welcome" in subprocess.run(inside, capture_output=True, check=True).stdout
    kube("delete", "pod", "p", "--wait=true", "--timeout=60s")
    refused = subprocess.run(
        kube.cluster.node.inside("busybox", "nc", "-w", "2", "127.0.0.1", "18080"),
        capture_output=True,
        check=False,
    )
    assert refused.returncode != 0


def test_pods_have_addresses_of_both_families(kube: Kube) -> None:
    """The pod's IPv4 and IPv6 addresses are in the API server, the containers' environment and
    /etc/hosts, and accept connections."""
    addresses = {"name": "IPS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}}
    script = "mkdir /w; echo $IPS > /w/ips; exec httpd -f -p [::]:80 -h /w"
    created = kube.run(pod("server", shell(script, env=[addresses])))
    addresses_of_pod = [entry["ip"] for entry in created["status"]["podIPs"]]
    subnets = [ip_network(subnet) for subnet in POD_SUBNETS]
    assert [
        ip_address(ip) in subnet for ip, subnet in zip(addresses_of_pod, subnets, strict=True)
    ] == [
        True,
        True,
    ]
    assert created["status"]["podIP"] == addresses_of_pod[0]
    kube.run(pod("client"))
    for host in (addresses_of_pod[0], f"[{addresses_of_pod[1]}]"):
        assert kube.sh("client", f"timeout 10 wget -qO- http://{host}/ips") == ",".join(
            addresses_of_pod
        )
    assert set(addresses_of_pod) <= set(kube.sh("server", "cat /etc/hosts").split())


def test_a_pod_has_its_dns_config(kube: Kube) -> None:
    dns = {
        "nameservers": ["10.10.10.10"],
        "searches": ["one.example", "two.example"],
        "options": [{"name": "ndots", "value": "3"}],
    }
    kube.run(pod("p", dnsPolicy="None", dnsConfig=dns))
    lines = kube.sh("p", "cat /etc/resolv.conf").splitlines()
    assert lines == ["search one.example two.example", "nameserver 10.10.10.10", "options ndots:3"]
    kube.run(pod("q"))
    assert "nameserver 10.96.0.10" in kube.sh("q", "cat /etc/resolv.conf")


def test_a_pod_has_its_hostname_and_host_aliases(kube: Kube) -> None:
    created = kube.run(
        pod("p", hostname="named", hostAliases=[{"ip": "1.2.3.4", "hostnames": ["alias.example"]}])
    )
    assert kube.sh("p", "hostname") == "named"
    hosts = kube.sh("p", "cat /etc/hosts")
    assert "alias.example" in hosts
    assert created["status"]["podIP"] in hosts
