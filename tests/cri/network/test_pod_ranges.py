"""Tests the pod CIDRs that kubelet sends: CNI plugins assign addresses from them, and they outlive
the server."""

from __future__ import annotations

import pytest

from pyrunc.errors import InvalidArgument, PeerError
from tests.cri.network.conftest import Node


def with_ranges_from_kubelet(node: Node) -> None:
    ipam = {"type": "host-local", "dataDir": str(node.folder / "leases")}
    node.configure(node.bridge(ipam=ipam, capabilities={"ipRanges": True}, forceAddress=True))


async def test_pods_get_addresses_of_kubelets_ranges(node: Node) -> None:
    with_ranges_from_kubelet(node)
    await node.network.set_pod_ranges(["10.77.0.0/24", "fd77::/64"])
    assert (await node.attach(node.host.pod())).ips == ("10.77.0.2", "fd77::2")
    with pytest.raises(InvalidArgument):
        await node.network.set_pod_ranges(["10.77.0.0/240"])


async def test_the_network_becomes_ready_with_the_pod_ranges(node: Node) -> None:
    with_ranges_from_kubelet(node)
    unready = await node.network.status()
    assert not unready.ready and "needs ranges or a subnet" in unready.message
    # kubelet sends the ranges before the network is ready, and starts pods only afterwards.
    await node.network.set_pod_ranges(["10.77.0.0/24"])
    assert (await node.network.status()).ready
    node.restart()
    assert (await node.network.status()).ready


async def test_pod_ranges_outlive_the_server(node: Node) -> None:
    """A restarted server assigns addresses before kubelet sends the ranges again."""
    with_ranges_from_kubelet(node)
    await node.network.set_pod_ranges(["10.77.0.0/24", " fd77::/64"])
    await node.attach(node.host.pod())
    node.restart()
    assert (await node.attach(node.host.pod())).ips == ("10.77.0.3", "fd77::3")
    await node.network.set_pod_ranges([""])
    assert (await node.attach(node.host.pod())).ips == ("10.77.0.4", "fd77::4")
    await node.network.set_pod_ranges(["10.78.0.0/24"])
    node.restart()
    assert (await node.attach(node.host.pod())).ips == ("10.78.0.2",)
    assert len(node.recorded()) == 4
    assert await node.network.reconcile(lambda: [pod.id for pod in node.host.pods]) == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1}',
        '{"version": 1, "subnets": [7]}',
        '{"version": 1, "subnets": ["x"]}',
    ],
)
async def test_damaged_pod_ranges_are_ignored(
    node: Node, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    with_ranges_from_kubelet(node)
    await node.network.set_pod_ranges(["10.77.0.0/24"])
    (node.folder / "state" / "pod-ranges").write_text(content)
    node.restart()
    assert "cannot read the stored pod CIDRs" in caplog.text
    with pytest.raises(PeerError):
        await node.attach(node.host.pod())
    await node.network.set_pod_ranges(["10.77.0.0/24"])
    assert (await node.attach(node.host.pod())).ips == ("10.77.0.2",)
    node.restart()
    assert (await node.attach(node.host.pod())).ips == ("10.77.0.3",)
