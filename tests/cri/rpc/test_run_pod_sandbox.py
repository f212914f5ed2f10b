"""RunPodSandbox: what a pod has when the call returns, who gets the same pod again, and what is refused."""

from __future__ import annotations

import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of


def test_identical_requests_give_one_pod(server: Server) -> None:
    config = server.pod_config("same")
    with ThreadPoolExecutor(50) as pool:
        assert len(set(pool.map(lambda _: server.run_pod(config), range(50)))) == 1
    pod = server.run_pod(config)
    assert len(server.pods()) == 1
    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(lambda _: server.create(pod), range(20)))) == 1
    other = server.pod_config("same", labels={"x": "y"})
    assert code_of(lambda: server.run_pod(other)) == grpc.StatusCode.ALREADY_EXISTS


def test_a_pod_on_the_hosts_network_has_no_address(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    assert server.pod_status(pod).network.ip == ""
    container = server.launch(pod)
    assert server.output(container, "ip", "link", "show", "lo")


def test_files_of_the_pod(server: Server) -> None:
    config = server.pod_config(
        hostname="myhost",
        dns_config=api.DNSConfig(
            servers=["10.10.10.10"], searches=["google.com", "b.c"], options=["ndots:8"]
        ),
    )
    container = server.launch(server.run_pod(config))
    assert server.output(container, "hostname") == "myhost\n"
    assert server.output(container, "cat", "/etc/hostname") == "myhost\n"
    expected = "search google.com b.c\nnameserver 10.10.10.10\noptions ndots:8\n"
    assert server.output(container, "cat", "/etc/resolv.conf") == expected
    assert server.output(container, "cat", "/etc/hosts") == Path("/etc/hosts").read_text()


def test_a_pod_on_the_nodes_network_has_its_name(server: Server) -> None:
    """Another would be in the files and the environment, but not what hostname(1) says."""
    with pytest.raises(grpc.RpcError) as refused:
        server.run_pod(server.pod_config(hostname="another"), host_network=True)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'another'" in refused.value.details() and not server.pods()
    for name in ("", socket.gethostname()):
        container = server.launch(server.run_pod(server.pod_config(hostname=name), host_network=True))
        assert server.output(container, "hostname").strip() == socket.gethostname()


def test_dns_by_presence(server: Server) -> None:
    none = server.launch(server.run_pod(server.pod_config(dns_config=api.DNSConfig())))
    assert server.output(none, "cat", "/etc/resolv.conf") == ""
    pod = server.run_pod()
    absent = server.launch(pod)
    assert server.output(absent, "cat", "/etc/resolv.conf") == Path("/etc/resolv.conf").read_text()
    assert server.output(absent, "hostname").strip() == pod[:12]


def test_shared_memory_belongs_to_the_pod(server: Server) -> None:
    pod = server.run_pod()
    first = server.launch(pod)
    second = server.launch(pod, server.container_config(metadata=api.ContainerMetadata(name="second")))
    other = server.launch(server.run_pod())
    server.output(first, "sh", "-c", "echo shared > /dev/shm/x")
    assert server.output(second, "cat", "/dev/shm/x") == "shared\n"
    assert server.exec(other, "cat", "/dev/shm/x").exit_code == 1
    assert "65536" in server.output(first, "df", "-k", "/dev/shm")


def test_sysctls_of_the_pod(server: Server) -> None:
    config = server.pod_config(
        linux=api.LinuxPodSandboxConfig(sysctls={"net.ipv4.ip_forward": "1", "kernel.shmmax": "4096000"})
    )
    config.linux.security_context.namespace_options.pid = api.CONTAINER
    container = server.launch(server.run_pod(config))
    assert server.output(container, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"
    assert server.output(container, "cat", "/proc/sys/kernel/shmmax") == "4096000\n"


def test_sysctls_of_the_network_may_name_the_pods_interface(server: Server) -> None:
    """Which is there before they are set; and what they forbid is forbidden on that interface, too."""
    asked = {"net.ipv4.conf.eth0.log_martians": "1", "net/ipv6/conf/all/disable_ipv6": "1"}
    pod = server.run_pod(server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=asked)))
    container = server.launch(pod)
    assert server.output(container, "cat", "/proc/sys/net/ipv4/conf/eth0/log_martians") == "1\n"
    assert server.output(container, "cat", "/proc/net/if_inet6") == ""
    server.remove_pod(pod)
    asked = {"net.ipv4.conf.eth7.log_martians": "1"}
    config = server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=asked))
    assert code_of(lambda: server.run_pod(config)) == grpc.StatusCode.INVALID_ARGUMENT
    assert not server.pods() and not list((server.state / "sandboxes").iterdir())


def test_host_ports_are_reachable(server: Server) -> None:
    config = server.pod_config(port_mappings=[api.PortMapping(container_port=8080, host_port=18080)])
    pod = server.run_pod(config)
    server.launch(pod, server.container_config(["sh", "-c", "while :; do echo answer | nc -l -p 8080; done"]))
    for address, port in ((server.pod_status(pod).network.ip, "8080"), ("10.88.0.1", "18080")):
        assert fetch(server, address, port) == b"answer\n", (address, port)


def fetch(server: Server, address: str, port: str) -> bytes:
    """What a TCP server says first, seen from the host; asked again while it does not listen."""
    inside = ["nsenter", f"--net=/proc/{server.pid}/ns/net", "--", "busybox", "nc", "-w", "2", address, port]
    for _ in range(300):
        done = subprocess.run(inside, capture_output=True, stdin=subprocess.DEVNULL)
        if done.stdout:
            return done.stdout
        time.sleep(0.1)
    return b""


@pytest.mark.parametrize("host_network", [False, True])
def test_users_of_the_pods_own(server: Server, host_network: bool) -> None:
    mapping = api.IDMapping(host_id=100_000, container_id=0, length=65_536)
    users = api.UserNamespace(mode=api.POD, uids=[mapping], gids=[mapping])
    pod_config = server.pod_config()
    pod_config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    pod = server.run_pod(pod_config, host_network=host_network)
    folder = server.folder / "owned"
    folder.mkdir(exist_ok=True)
    mount = api.Mount(
        container_path="/data", host_path=str(folder), uidMappings=[mapping], gidMappings=[mapping]
    )
    config = server.container_config(mounts=[mount])
    refused = server.container_config(metadata=api.ContainerMetadata(name="refused"))
    assert code_of(lambda: server.create(pod, refused)) == grpc.StatusCode.INVALID_ARGUMENT
    config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    container = server.launch(pod, config)
    assert server.output(container, "cat", "/proc/self/uid_map").split() == ["0", "100000", "65536"]
    server.output(container, "touch", "/data/x", "/dev/shm/x", "/new")
    assert (
        server.output(container, "stat", "-c", "%u", "/", "/bin", "/etc/resolv.conf", "/dev/shm", "/data")
        == "0\n" * 5
    )
    assert (folder / "x").stat().st_uid == 0, "an idmapped mount keeps the host's ids"
    assert (server.root / "containers" / container / "upper" / "new").stat().st_uid == 100_000
    assert server.pod_status(pod).linux.namespaces.options.userns_options == users
