"""Tests the effects of configuration settings on pods and containers."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.cri.server_harness import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "hooks").mkdir()
    hook = {"path": "/bin/sh", "args": ["sh", "-c", f"cat > {folder}/ran"]}
    content = {
        "version": "1.0.0",
        "hook": hook,
        "when": {"annotations": {"^hook$": "^yes$"}},
        "stages": ["createRuntime"],
    }
    (folder / "hooks" / "1.json").write_text(json.dumps(content))
    settings = {
        "server": {"socket_gid": 4242, "socket_mode": "0666"},
        "pods": {"unprivileged_ports": True, "unprivileged_ping": True},
        "containers": {
            "default_capabilities": ["CAP_KILL"],
            "device_ownership": True,
            "hooks_dirs": [str(folder / "hooks")],
            "pod_annotations": ["io.example/*"],
            "container_annotations": ["exact"],
        },
    }
    with Server(settings=settings) as started:
        started.load_image()
        yield started


def test_the_socket_has_the_configured_owner(server: Server) -> None:
    facts = os.stat(server.socket)
    assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (0, 4242, 0o666)


def test_a_container_has_the_configured_settings(server: Server, folder: Path) -> None:
    pod_config = server.pod_config()
    pod_config.annotations.update({"io.example/a": "1", "io.other/a": "2", "hook": "yes"})
    pod = server.run_pod(pod_config)
    config = server.container_config(annotations={"exact": "3", "exactly": "4"})
    config.devices.add(host_path="/dev/null", container_path="/dev/other", permissions="rw")
    config.linux.security_context.run_as_user.value = 77
    config.linux.security_context.run_as_group.value = 88
    container = server.launch(pod, config)
    try:
        seen = server.output(
            container,
            "sh",
            "-c",
            "cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/ipv4/ping_group_range",
        )
        assert seen.split() == ["0", "0", "2147483647"]
        assert server.output(container, "stat", "-c", "%u:%g", "/dev/other").strip() == "77:88"
        assert "CapBnd:\t0000000000000020" in server.output(container, "cat", "/proc/self/status")
        spec = json.loads((server.state / "containers" / container / "config.json").read_text())
        passed = {
            k: v for k, v in spec["annotations"].items() if not k.startswith("io.kubernetes.")
        }
        assert passed == {"io.example/a": "1", "exact": "3"}
        assert json.loads((folder / "ran").read_text())["id"] == container
    finally:
        server.remove_pod(pod)


def test_only_configured_handlers_have_hooks_and_resource_classes(
    server: Server, folder: Path
) -> None:
    (folder / "ran").unlink(missing_ok=True)
    pod_config = server.pod_config()
    pod = server.run_pod(pod_config)
    try:
        server.launch(pod)
        assert not (folder / "ran").exists()
    finally:
        server.remove_pod(pod)


def test_a_pod_of_the_hosts_network_keeps_the_hosts_settings(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    try:
        before = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()
        container = server.launch(pod)
        assert (
            server.output(container, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start")
            == before
        )
    finally:
        server.remove_pod(pod)


@pytest.mark.requirement("13.23")
def test_a_class_of_caches_needs_resctrl(server: Server) -> None:
    """Without resctrl, which no test machine has, CreateContainer refuses an RDT class."""
    pod_config = server.pod_config()
    pod_config.annotations["rdt.resources.beta.kubernetes.io/pod"] = "gold"
    pod = server.run_pod(pod_config)
    try:
        with pytest.raises(
            grpc.RpcError, match="RDT class 'gold': the resctrl filesystem is not mounted"
        ) as refused:
            server.create(pod)
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert not server.containers()
    finally:
        server.remove_pod(pod)
