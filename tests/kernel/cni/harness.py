"""A throwaway host for plugin tests: the test's thread enters a new network namespace; pods are
further ones.

Network devices and addresses of the environment are made with pyroute2, never with the code under
test.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from cni_plugins.bridge.plugin import PLUGIN as BRIDGE
from cni_plugins.host_local.plugin import PLUGIN as HOST_LOCAL  # noqa: F401
from cni_plugins.loopback.plugin import PLUGIN as LOOPBACK  # noqa: F401
from cni_plugins.net import host_rules, netns
from cni_plugins.net.nfnetlink import Element
from cni_plugins.portmap.plugin import PLUGIN as PORTMAP  # noqa: F401
from cni_plugins.skel import CniPlugin, answer
from pyrunc.kernel.call import syscall

CLONE_NEWNET = 0x40000000
HOST_OUTER, CLIENT = "192.0.2.1", "192.0.2.2"
HOST_OUTER6, CLIENT6 = "2001:db8::1", "2001:db8::2"
_TIMEOUT_S = 2.0


def open_new_namespace() -> int:
    """Return a descriptor of a new network namespace; the thread stays in its own."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscall("unshare", "network namespace", CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        syscall("setns", "own network namespace", own, CLONE_NEWNET)
        return namespace
    finally:
        os.close(own)


@dataclass
class Pod:
    """A pod's network namespace, which plugins attach; `id` is the container id."""

    id: str
    fd: int

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class Host:
    """The host namespace of the test's thread."""

    folder: str
    pods: list[Pod] = field(default_factory=list)
    outside: int = -1

    def pod(self, name: str | None = None) -> Pod:
        pod = Pod(name or f"pod{len(self.pods)}", open_new_namespace())
        self.pods.append(pod)
        return pod

    def connect_outside(self) -> None:
        """Add a client beyond the host, in the namespace `outside`: 192.0.2.2 and 2001:db8::2,
        without routes to pods."""
        self.outside = open_new_namespace()
        with IPRoute() as route:
            route.link(
                "add",
                ifname="outer",
                kind="veth",
                peer={"ifname": "eth0", "net_ns_fd": self.outside},
            )
            configure(route, "outer", (HOST_OUTER, 24), (HOST_OUTER6, 64))
        with netns.entered(self.outside), IPRoute() as route:
            configure(route, "eth0", (CLIENT, 24), (CLIENT6, 64))
            configure(route, "lo")

    def close(self) -> None:
        for pod in self.pods:
            pod.close()
        if self.outside >= 0:
            os.close(self.outside)

    def bridge_config(self, **changes: Any) -> dict[str, Any]:
        """Return a dual-stack gateway network, with `changes` at the top level."""
        config = {
            "cniVersion": "1.1.0",
            "name": "net",
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipam": self.ipam(),
        }
        return {**config, **changes}

    def ipam(self, *subnets: str, **changes: Any) -> dict[str, Any]:
        subnet_list = subnets or ("10.88.0.0/16", "fd88::/64")
        routes = [{"dst": "::/0" if ":" in subnet else "0.0.0.0/0"} for subnet in subnet_list]
        ranges = [[{"subnet": subnet}] for subnet in subnet_list]
        return {
            "type": "host-local",
            "dataDir": f"{self.folder}/leases",
            "ranges": ranges,
            "routes": routes,
            **changes,
        }


@contextmanager
def new_host(folder: str) -> Iterator[Host]:
    """Enter a new host for a block."""
    namespace = open_new_namespace()
    host = Host(folder)
    try:
        with netns.entered(namespace):
            with IPRoute() as route:
                configure(route, "lo")
            try:
                yield host
            finally:
                host.close()
    finally:
        os.close(namespace)


def configure(route: Any, name: str, *addresses: tuple[str, int]) -> None:
    (index,) = route.link_lookup(ifname=name)
    route.link("set", index=index, state="up")
    for address, prefix in addresses:
        flags = {"flags": 0x02} if ":" in address else {}
        route.addr("add", index=index, address=address, prefixlen=prefix, **flags)


@dataclass
class Refused(Exception):
    """A plugin's error object."""

    code: int
    message: str


def call(
    plugin: CniPlugin,
    command: str,
    pod: Pod,
    config: dict[str, Any],
    *,
    netns_path: str | None = None,
    args: str = "",
) -> Any:
    """Call a plugin with a request's environment and input, as a runtime does; returns the parsed
    output, or raises Refused."""
    environment = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": pod.id,
        "CNI_NETNS": pod.path if netns_path is None else netns_path,
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": args,
        "CNI_PATH": "/nowhere",
    }
    code, output = answer(plugin, environment, json.dumps(config).encode())
    value = json.loads(output) if output else None
    if code:
        raise Refused(value["code"], value["msg"])
    return value


def attach(pod: Pod, config: dict[str, Any], **options: Any) -> Any:
    return call(BRIDGE, "ADD", pod, config, **options)


def portmap_config(previous: Any, *mappings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "cniVersion": "1.1.0",
        "name": "net",
        "type": "portmap",
        "runtimeConfig": {"portMappings": list(mappings)},
        "prevResult": previous,
        **changes,
    }


def addresses_of(result: Any) -> list[str]:
    return [entry["address"].split("/")[0] for entry in result["ips"]]


def listen(
    namespace: int, address: str, port: int, kind: int = socket.SOCK_STREAM
) -> socket.socket:
    """Return a listening socket in a namespace."""
    with netns.entered(namespace):
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    listener.settimeout(_TIMEOUT_S)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    if kind == socket.SOCK_STREAM:
        listener.listen(16)
    return listener


def reach(
    namespace: int | None,
    address: str,
    port: int,
    server: socket.socket,
    *,
    source: str = "",
    look: Callable[[socket.socket], None] = lambda client: None,
) -> str:
    """Connect from a namespace (None: the host) and exchange data both ways; returns the client's
    address as the server sees it. `look` gets the client's TCP socket at the end. Raises OSError
    without an answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if namespace is None:
        client = socket.socket(family, server.type)
    else:
        with netns.entered(namespace):
            client = socket.socket(family, server.type)
    with client:
        client.settimeout(_TIMEOUT_S)
        if source:
            client.bind((source, 0))
        client.connect((address, port))
        if server.type == socket.SOCK_DGRAM:
            return _datagrams(client, server)
        accepted, peer = server.accept()
        with accepted:
            accepted.settimeout(_TIMEOUT_S)
            client.sendall(b"question")
            assert accepted.recv(100) == b"question"
            accepted.sendall(b"answer")
            assert client.recv(100) == b"answer"
        look(client)
        return str(peer[0])


def nothing_was_lost(client: socket.socket) -> None:
    """Check the kernel's own statistics of a connection: no segment was sent twice, and none waited
    a second for the kernel to ask again for a neighbour's address. A busy machine does not change
    these numbers."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    rtt_us = struct.unpack_from("I", info, 68)[0]
    retransmitted = struct.unpack_from("I", info, 100)[0]
    assert retransmitted == 0 and 0 < rtt_us < 500_000, (retransmitted, rtt_us)


def _datagrams(client: socket.socket, server: socket.socket) -> str:
    client.send(b"question")
    content, peer = server.recvfrom(100)
    assert content == b"question"
    server.sendto(b"answer", peer)
    assert client.recv(100) == b"answer"
    return str(peer[0])


def unreachable(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def link_names() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def find_link(name: str) -> Any:
    """Return pyroute2's message about the network device; None when it is missing."""
    with IPRoute() as route:
        matches = [entry for entry in route.get_links() if entry.get_attr("IFLA_IFNAME") == name]
    return matches[0] if matches else None


def delete_link(name: str) -> None:
    with IPRoute() as route:
        route.link("del", index=route.link_lookup(ifname=name)[0])


def all_elements() -> list[Element]:
    return host_rules.all_elements(host_rules.PORT_SETS + host_rules.MASQUERADE_SETS)


def nft(*words: str) -> str:
    return subprocess.run(["nft", *words], check=True, capture_output=True, text=True).stdout


def read_sysctl(name: str) -> str:
    """Return the value of a sysctl in the current network namespace."""
    return Path("/proc/sys", name).read_text().strip()
