"""Tests that containerd runs pods with pyrunc's CNI plugins instead of the reference ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.bench.peer import Containerd, pause_archive
from tests.support import cri, images, session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def containerd(tmp_path: Path) -> Iterator[Containerd]:
    name = session.name("containerd")
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    ours = tmp_path / "plugins"
    subprocess.run([sys.executable, "-m", "cni_plugins.install", str(ours)], check=True)
    peer = Containerd(tmp_path / "containerd", name, plugins=ours)
    try:
        peer.start([images.busybox(), pause_archive(tmp_path)])
        yield peer
    finally:
        peer.stop()
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_a_pod_gets_its_address_from_our_plugins(containerd: Containerd) -> None:
    with cri.connect(containerd.socket) as client:
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name="p", uid="p", namespace="n"), hostname="p"
        )
        config.port_mappings.add(container_port=80, host_port=18080)
        pod = client.runtime.RunPodSandbox(
            api.RunPodSandboxRequest(config=config), timeout=60
        ).pod_sandbox_id
        status = client.runtime.PodSandboxStatus(
            api.PodSandboxStatusRequest(pod_sandbox_id=pod)
        ).status
        assert status.network.ip.startswith("10.88.")
        listing = subprocess.run(
            [
                "nsenter",
                f"--net=/run/netns/{containerd.namespace}",
                "nft",
                "list",
                "table",
                "inet",
                "pyrunc_cni",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert status.network.ip in listing
        client.runtime.StopPodSandbox(api.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=60)
        client.runtime.RemovePodSandbox(api.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=60)
        leases = [p.name for p in (containerd.folder / "leases").rglob("10.88.*")]
        assert not leases
