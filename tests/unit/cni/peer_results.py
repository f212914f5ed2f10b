"""Results that network add-ons return for the CNI command ADD, from their sources and bug
reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# Stands for the value of CNI_NETNS.
NETNS = "@NETNS@"


@dataclass(frozen=True)
class PeerResult:
    """A plugin's `answer` to ADD under a configuration of `cni_version`, and the addresses that the
    pod then has."""

    name: str
    cni_version: str
    answer: dict[str, Any]
    ips: tuple[str, ...]

    def answer_in(self, netns: str) -> dict[str, Any]:
        document = json.loads(json.dumps(self.answer).replace(NETNS, netns))
        assert isinstance(document, dict)
        return document


def _aws(mac: str, sandbox: str) -> dict[str, Any]:
    """Return the result of amazon-vpc-cni-k8s since 1.7."""
    return {
        "cniVersion": "0.4.0",
        "interfaces": [
            {"name": "eni7240c55beb0"},
            {"name": "eth0", "sandbox": NETNS},
            # No such interface: the plugin's DEL reads the entry.
            {"name": "dummy7240c55beb0", "mac": mac, "sandbox": sandbox},
        ],
        "ips": [{"version": "4", "interface": 1, "address": "10.24.136.194/32"}],
        "dns": {},
    }


PEER_RESULTS = [
    PeerResult("the AWS VPC CNI", "0.4.0", _aws("0", "0"), ("10.24.136.194",)),
    PeerResult(
        "the AWS VPC CNI, branch interface of VLAN 101",
        "0.4.0",
        _aws("101", "2"),
        ("10.24.136.194",),
    ),
    PeerResult(
        "the AWS VPC CNI under a list of 1.0.0", "1.0.0", _aws("0", "0"), ("10.24.136.194",)
    ),
    PeerResult(
        "the AWS VPC CNI before 1.7",
        "0.3.1",
        {"cniVersion": "0.3.1", "ips": [{"version": "4", "address": "10.0.1.186/32"}], "dns": {}},
        ("10.0.1.186",),
    ),
    PeerResult(
        "Calico names the host's interface only",
        "0.3.1",
        {
            "cniVersion": "0.3.1",
            "interfaces": [{"name": "cali05f4a1849c5"}],
            "ips": [
                {"version": "4", "address": "10.244.196.152/32"},
                {"version": "6", "address": "fd10:244::c497/128"},
            ],
            "dns": {},
        },
        ("10.244.196.152", "fd10:244::c497"),
    ),
    PeerResult(
        "kindnet names no sandbox",
        "0.4.0",
        {
            "cniVersion": "0.4.0",
            "interfaces": [{"name": "eth0"}],
            "ips": [{"version": "4", "interface": 0, "address": "10.244.0.3/32"}],
            "dns": {},
        },
        ("10.244.0.3",),
    ),
    PeerResult(
        "a sandbox that is the container's id",
        "1.0.0",
        {
            "cniVersion": "1.0.0",
            "interfaces": [{"name": "eth0", "sandbox": "6397e269c6b847d5"}],
            "ips": [{"interface": 0, "address": "10.1.2.3/24"}],
        },
        ("10.1.2.3",),
    ),
    PeerResult(
        "the host's interface is called like the pod's",
        "1.0.0",
        {
            "cniVersion": "1.0.0",
            "interfaces": [
                {"name": "eth0", "mac": "02:42:00:00:00:01"},
                {"name": "eth0", "sandbox": NETNS},
            ],
            "ips": [
                {"interface": 0, "address": "192.0.2.1/24"},
                {"interface": 1, "address": "10.1.2.4/24"},
            ],
        },
        ("10.1.2.4",),
    ),
    PeerResult(
        "kube-ovn's internal port has its own name",
        "0.3.1",
        {
            "cniVersion": "1.0.0",
            "interfaces": [{"name": "f3d0a1b2_c_h", "mac": "00:00:00:53:6B:BA", "sandbox": NETNS}],
            "ips": [{"interface": 0, "address": "10.16.0.9/16", "gateway": "10.16.0.1"}],
            "routes": [{"dst": "0.0.0.0/0", "gw": "10.16.0.1"}],
            "dns": {},
        },
        ("10.16.0.9",),
    ),
    PeerResult(
        "weave gives no version",
        "0.3.0",
        {"ips": [{"version": "4", "address": "10.32.0.3/12", "gateway": "10.32.0.1"}], "dns": {}},
        ("10.32.0.3",),
    ),
    PeerResult(
        "an empty version and nulls, as Go writes empty slices",
        "1.0.0",
        {
            "cniVersion": "",
            "interfaces": None,
            "ips": [{"address": "10.1.2.5/24", "gateway": ""}],
            "routes": None,
            "dns": {},
        },
        ("10.1.2.5",),
    ),
    PeerResult(
        "Antrea, GKE's ptp and the reference bridge",
        "0.3.0",
        {
            "cniVersion": "0.3.0",
            "interfaces": [
                {"name": "nginx-6-4b9f2e", "mac": "12:8f:b8:e4:1a:03"},
                {"name": "eth0", "mac": "4A:06:56:E5:00:05", "sandbox": NETNS},
            ],
            "ips": [
                {"version": "4", "interface": 1, "address": "10.10.1.7/24", "gateway": "10.10.1.1"},
                {
                    "version": "6",
                    "interface": 1,
                    "address": "fd00:10::7/64",
                    "gateway": "fd00:10::1",
                },
            ],
            "routes": [
                {"dst": "0.0.0.0/0", "gw": "10.10.1.1"},
                {"dst": "::/0", "gw": "fd00:10::1"},
            ],
            "dns": {"nameservers": ["168.63.129.16"]},
        },
        ("10.10.1.7", "fd00:10::7"),
    ),
    PeerResult(
        "InfiniBand, SR-IOV and a vhost-user socket, with keys of no version",
        "1.1.0",
        {
            "cniVersion": "1.1.0",
            "interfaces": [
                {
                    "name": "eth0",
                    "mac": "80:00:02:08:fe:80:00:00:00:00:00:00:e4:1d:2d:03:00:e7:1a:41",
                    "sandbox": NETNS,
                    "mtu": 2044,
                    "pciID": "0000:03:00.1",
                    "socketPath": "/var/run/vpp/punt.sock",
                    "vfID": 3,
                },
                {"name": "an-interface-of-a-hypervisor", "mac": "none", "mtu": "9000"},
            ],
            "ips": [
                {"interface": 0, "address": "10.1.2.6/24"},
                {"interface": 1, "address": "dhcp"},
            ],
            "routes": [{"dst": "default"}],
            "dns": {"search": ["${pod}.svc"]},
            "portMappings": [{"hostPort": 80}],
        },
        ("10.1.2.6",),
    ),
    PeerResult(
        "a plugin of 0.2.0, as flannel and Calico wrote it",
        "0.2.0",
        {
            "cniVersion": "0.2.0",
            "ip4": {
                "ip": "10.3.60.121/24",
                "gateway": "10.3.0.1",
                "routes": [{"dst": "0.0.0.0/0", "gw": "10.3.0.1"}],
            },
            "ip6": {"ip": "fd00:3::121/64"},
            "dns": {"nameservers": ["10.3.0.10"]},
        },
        ("10.3.60.121", "fd00:3::121"),
    ),
    PeerResult(
        "a plugin of the first version, under a list of 1.0.0",
        "1.0.0",
        {"cniVersion": "0.1.0", "ip4": {"ip": "10.3.60.122/32"}, "dns": {}},
        ("10.3.60.122",),
    ),
]
