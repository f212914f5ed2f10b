"""RunPodSandbox: the pod when the call returns, retries that get the same pod, and refused
requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of, message_of
from tests.support.capabilities import holds


@pytest.mark.requirement("2.3", "13.1")
def test_identical_requests_return_the_same_pod(server: Server) -> None:
    config = server.pod_config("same")
    with ThreadPoolExecutor(50) as pool:
        assert len(set(pool.map(lambda _: server.run_pod(config), range(50)))) == 1
    pod = server.run_pod(config)
    assert len(server.pods()) == 1
    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(lambda _: server.create(pod), range(20)))) == 1
    other = server.pod_config("same", labels={"x": "y"})
    assert code_of(lambda: server.run_pod(other)) == grpc.StatusCode.ALREADY_EXISTS


@pytest.mark.requirement("3.1.2", "8.15")
def test_a_pod_on_the_hosts_network_has_no_address(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    assert server.pod_status(pod).network.ip == ""
    container = server.launch(pod)
    assert server.output(container, "ip", "link", "show", "lo")


@pytest.mark.requirement("3.1.6", "6.1", "6.2", "6.3")
def test_a_pod_has_its_hostname_hosts_and_resolver_files(server: Server) -> None:
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


@pytest.mark.requirement("6.2", "8.15")
def test_a_pod_on_the_nodes_network_has_its_name(server: Server) -> None:
    """RunPodSandbox refuses another hostname for a pod with host networking."""
    # The pod's files and environment would show it, but hostname(1) would print the node's.
    with pytest.raises(grpc.RpcError) as refused:
        server.run_pod(server.pod_config(hostname="another"), host_network=True)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'another'" in refused.value.details() and not server.pods()
    for name in ("", socket.gethostname()):
        container = server.launch(
            server.run_pod(server.pod_config(hostname=name), host_network=True)
        )
        assert server.output(container, "hostname").strip() == socket.gethostname()


@pytest.mark.requirement("6.2", "6.3", "13.10", "14.3")
def test_an_empty_dns_config_differs_from_a_missing_one(server: Server) -> None:
    none = server.launch(server.run_pod(server.pod_config(dns_config=api.DNSConfig())))
    assert server.output(none, "cat", "/etc/resolv.conf") == ""
    pod = server.run_pod()
    absent = server.launch(pod)
    assert server.output(absent, "cat", "/etc/resolv.conf") == Path("/etc/resolv.conf").read_text()
    assert server.output(absent, "hostname").strip() == pod[:12]


@pytest.mark.requirement("3.1.6", "6.4")
def test_shared_memory_belongs_to_the_pod(server: Server) -> None:
    pod = server.run_pod()
    first = server.launch(pod)
    second = server.launch(
        pod, server.container_config(metadata=api.ContainerMetadata(name="second"))
    )
    other = server.launch(server.run_pod())
    server.output(first, "sh", "-c", "echo shared > /dev/shm/x")
    assert server.output(second, "cat", "/dev/shm/x") == "shared\n"
    assert server.exec(other, "cat", "/dev/shm/x").exit_code == 1
    assert "65536" in server.output(first, "df", "-k", "/dev/shm")


@pytest.mark.requirement("3.1.4")
def test_a_pod_has_its_sysctls(server: Server) -> None:
    config = server.pod_config(
        linux=api.LinuxPodSandboxConfig(
            sysctls={"net.ipv4.ip_forward": "1", "kernel.shmmax": "4096000"}
        )
    )
    config.linux.security_context.namespace_options.pid = api.CONTAINER
    container = server.launch(server.run_pod(config))
    assert server.output(container, "cat", "/proc/sys/net/ipv4/ip_forward") == "1\n"
    assert server.output(container, "cat", "/proc/sys/kernel/shmmax") == "4096000\n"


def test_sysctls_of_the_network_may_name_the_pods_interface(server: Server) -> None:
    """Sysctls of eth0 and of all interfaces apply: the pod's interface exists before they are
    set."""
    sysctls = {"net.ipv4.conf.eth0.log_martians": "1", "net/ipv6/conf/all/disable_ipv6": "1"}
    pod = server.run_pod(server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=sysctls)))
    container = server.launch(pod)
    assert server.output(container, "cat", "/proc/sys/net/ipv4/conf/eth0/log_martians") == "1\n"
    assert server.output(container, "cat", "/proc/net/if_inet6") == ""
    server.remove_pod(pod)
    sysctls = {"net.ipv4.conf.eth7.log_martians": "1"}
    config = server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls=sysctls))
    assert code_of(lambda: server.run_pod(config)) == grpc.StatusCode.INVALID_ARGUMENT
    assert not server.pods() and not list((server.state / "sandboxes").iterdir())


def test_the_error_of_a_taken_host_port_names_the_other_pod(server: Server) -> None:
    ports = [api.PortMapping(container_port=8080, host_port=18081)]
    owner = server.run_pod(server.pod_config("owner", port_mappings=ports))
    message = message_of(lambda: server.run_pod(server.pod_config("other", port_mappings=ports)))
    assert "host port 18081/tcp is already taken by" in message
    assert message.endswith(f"({owner[:12]}… is pod default/owner)")


@pytest.mark.requirement("3.1.7")
def test_host_ports_are_reachable(server: Server) -> None:
    config = server.pod_config(
        port_mappings=[api.PortMapping(container_port=8080, host_port=18080)]
    )
    pod = server.run_pod(config)
    server.launch(
        pod, server.container_config(["sh", "-c", "while :; do echo answer | nc -l -p 8080; done"])
    )
    for address, port in ((server.pod_status(pod).network.ip, "8080"), ("10.88.0.1", "18080")):
        assert fetch(server, address, port) == b"answer\n", (address, port)


def fetch(server: Server, address: str, port: str) -> bytes:
    """Return what a pod's TCP server sends to a client on the host; retry until the server
    listens."""
    inside = [
        "nsenter",
        f"--net=/proc/{server.pid}/ns/net",
        "--",
        "busybox",
        "nc",
        "-w",
        "2",
        address,
        port,
    ]
    for _ in range(300):
        done = subprocess.run(inside, capture_output=True, stdin=subprocess.DEVNULL)
        if done.stdout:
            return done.stdout
        time.sleep(0.1)
    return b""


@pytest.mark.requirement("6.5", "6.11", "8.16")
@pytest.mark.parametrize("host_network", [False, True])
def test_a_pod_can_have_a_user_namespace(server: Server, host_network: bool) -> None:
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
        server.output(
            container, "stat", "-c", "%u", "/", "/bin", "/etc/resolv.conf", "/dev/shm", "/data"
        )
        == "0\n" * 5
    )
    assert (folder / "x").stat().st_uid == 0, "an idmapped mount keeps the host's ids"
    assert (server.root / "containers" / container / "upper" / "new").stat().st_uid == 100_000
    assert server.pod_status(pod).linux.namespaces.options.userns_options == users


def pause_process(server: Server, pod: str) -> int:
    request = api.PodSandboxStatusRequest(pod_sandbox_id=pod, verbose=True)
    return int(json.loads(server.runtime.PodSandboxStatus(request, timeout=30).info["info"])["pid"])


def namespaces_of(server: Server, pod: str) -> dict[str, str]:
    """Return the namespaces of the pod's pause process."""
    pid = pause_process(server, pod)
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "ipc", "uts", "pid")}


@pytest.mark.requirement("3.1.1")
def test_a_pod_has_new_namespaces_or_the_nodes(server: Server) -> None:
    """A pod shares only those namespaces of the node that its configuration names."""
    # The server runs in its own network namespace.
    nodes = {
        kind: os.readlink(f"/proc/{server.pid}/ns/{kind}") for kind in ("net", "ipc", "uts", "pid")
    }
    pods = [namespaces_of(server, server.run_pod()) for _ in range(2)]
    assert all(
        len({pods[0][kind], pods[1][kind], nodes[kind]}) == 3 for kind in ("net", "ipc", "uts")
    )
    config = server.pod_config()
    options = config.linux.security_context.namespace_options
    options.ipc, options.pid = api.NODE, api.POD
    namespaces = namespaces_of(server, server.run_pod(config, host_network=True))
    assert {kind for kind in namespaces if namespaces[kind] == nodes[kind]} == {"net", "ipc", "uts"}


@pytest.mark.requirement("3.1.4")
@pytest.mark.parametrize(
    "sysctl, options",
    [
        ("net.ipv4.ip_forward", {"network": api.NODE}),
        ("kernel.shmmax", {"ipc": api.NODE}),
        ("kernel.panic", {}),
    ],
)
def test_sysctls_that_would_change_the_node_are_refused(
    server: Server, sysctl: str, options: dict[str, Any]
) -> None:
    config = server.pod_config(linux=api.LinuxPodSandboxConfig(sysctls={sysctl: "1"}))
    for name, mode in options.items():
        setattr(config.linux.security_context.namespace_options, name, mode)
    with pytest.raises(grpc.RpcError) as refused:
        server.run_pod(config)
    assert (
        refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        and sysctl in refused.value.details()
    )
    assert not server.pods()


@pytest.mark.requirement("13.15")
def test_only_requested_sysctls_are_set(server: Server) -> None:
    container = server.launch(server.run_pod())
    names = ("ip_unprivileged_port_start", "ping_group_range")
    values = [
        server.output(container, "cat", f"/proc/sys/net/ipv4/{name}").split() for name in names
    ]
    assert values == [["1024"], ["1", "0"]], "the kernel's own values"


@pytest.mark.requirement("3.1.5")
def test_the_log_directory_is_created(server: Server) -> None:
    folder = server.logs / "made" / "for" / "it"
    server.run_pod(server.pod_config(log_directory=str(folder)))
    assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.requirement("6.4")
def test_a_pod_with_the_nodes_ipc_shares_its_dev_shm(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.namespace_options.ipc = api.NODE
    container_config = server.container_config()
    container_config.linux.security_context.namespace_options.ipc = api.NODE
    container = server.launch(server.run_pod(config), container_config)
    shm = os.stat("/dev/shm")
    assert server.output(container, "stat", "-c", "%d %i", "/dev/shm").split() == [
        str(shm.st_dev),
        str(shm.st_ino),
    ]


@pytest.mark.requirement("3.1.10", "8.8")
@pytest.mark.parametrize(
    "kind, mode", [(api.SecurityProfile.RuntimeDefault, "2"), (api.SecurityProfile.Unconfined, "0")]
)
def test_the_pause_process_has_the_pods_filter_and_its_score(
    server: Server, kind: Any, mode: str
) -> None:
    config = server.pod_config()
    config.linux.security_context.seccomp.profile_type = kind
    pid = pause_process(server, server.run_pod(config))
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == (mode, "1", 0)
    own = int(Path("/proc/self/oom_score_adj").read_text())
    score = -998 if holds("CAP_SYS_RESOURCE") else max(-998, own)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == f"{score}\n"


@pytest.mark.requirement("6.4")
def test_a_container_with_separate_ipc_has_a_separate_dev_shm(server: Server) -> None:
    pod = server.run_pod()
    config = server.container_config(metadata=api.ContainerMetadata(name="own"))
    config.linux.security_context.namespace_options.ipc = api.CONTAINER
    own, shared = server.launch(pod, config), server.launch(pod)
    server.output(shared, "touch", "/dev/shm/x")
    assert server.output(own, "ls", "/dev/shm") == ""
    ipc = [server.output(each, "readlink", "/proc/self/ns/ipc") for each in (own, shared)]
    assert ipc[0] != ipc[1]
