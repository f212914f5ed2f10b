"""Tests the server with the CNI project's reference plugins (Go) in its folder: they run instead of
pyrunc's and do the same for a pod."""

from __future__ import annotations

import asyncio
import os

import pytest

from cni_plugins.net import host_rules
from cri_server.network.model import PortMapping
from tests.cri.network.conftest import Node, until
from tests.kernel.cni.harness import all_elements, link_names, listen, nft, reach
from tests.kernel.cni.test_executables import NAMES, reference

pytestmark = pytest.mark.timeout(600)


def use_reference(node: Node, *names: str) -> None:
    folder = reference()
    for name in names:
        os.symlink(os.path.join(folder, name), node.folder / "bin" / name)


@pytest.mark.parametrize("names", [NAMES, ("bridge", "host-local"), ("portmap",), ("host-local",)])
async def test_pods_live_with_the_reference_plugins(node: Node, names: tuple[str, ...]) -> None:
    use_reference(node, *names)
    portmap = {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": True}}
    node.configure(
        node.bridge(ipMasq="portmap" not in names, hairpinMode=True, isDefaultGateway=True), portmap
    )
    await asyncio.to_thread(node.host.connect_outside)
    pods = [node.host.pod() for _ in range(3)]
    results = await asyncio.gather(
        *(
            node.attach(pod, port_mappings=(PortMapping(8080 + i, 80),))
            for i, pod in enumerate(pods)
        )
    )
    assert {r.ips for r in results} == {("10.88.0.2",), ("10.88.0.3",), ("10.88.0.4",)}
    for number, pod in enumerate(pods):
        with listen(pod.fd, "0.0.0.0", 80) as server:
            assert reach(node.host.outside, "192.0.2.1", 8080 + number, server) == "192.0.2.2"
            assert reach(None, "127.0.0.1", 8080 + number, server)
        await node.check(pod.id)
    node.restart()
    assert await node.network.reconcile(lambda: [pod.id for pod in pods]) == []
    for pod in pods:
        await node.network.detach(pod.id, pod.path)
        pod.close()
    await until(lambda: not [n for n in link_names() if n.startswith("veth")])
    assert not node.leases() and not node.recorded() and not all_elements()
    assert not [n for n in link_names() if n.startswith("veth")]
    assert "8080" not in nft("list", "ruleset")


@pytest.mark.parametrize("old", ["0.1.0", "0.2.0", ""])
@pytest.mark.parametrize("names", [NAMES, ("bridge", "host-local"), ("portmap",)])
async def test_a_list_of_the_first_versions_runs_both_kinds_of_plugins(
    node: Node, names: tuple[str, ...], old: str
) -> None:
    """Reference plugins and pyrunc's pass each other results with one address per family; in these
    CNI versions, DEL gets no result."""
    use_reference(node, *names)
    portmap = {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": True}}
    node.configure(node.bridge(ipMasq=False, isDefaultGateway=True), portmap, cniVersion=old)
    await asyncio.to_thread(node.host.connect_outside)
    pod = node.host.pod()
    assert (await node.attach(pod, port_mappings=(PortMapping(8080, 80),))).ips == ("10.88.0.2",)
    with listen(pod.fd, "0.0.0.0", 80) as server:
        assert reach(node.host.outside, "192.0.2.1", 8080, server) == "192.0.2.2"
    node.restart()
    assert await node.network.reconcile(lambda: [pod.id]) == []
    await node.network.detach(pod.id, pod.path)
    pod.close()
    await until(lambda: not [n for n in link_names() if n.startswith("veth")])
    assert not node.leases() and not node.recorded() and not all_elements()
    assert "8080" not in nft("list", "ruleset")


async def test_either_sides_plugins_detach_a_pod_of_the_other(node: Node) -> None:
    """Pods that the reference plugins attached are detached by pyrunc's plugins, and the other way
    round."""
    node.configure(node.bridge(ipMasq=False))
    by_ours = node.host.pod("ours")
    await node.attach(by_ours)
    use_reference(node, "bridge", "host-local")
    by_theirs = node.host.pod("theirs")
    await node.attach(by_theirs)
    await node.network.detach(by_ours.id, by_ours.path)
    for name in ("bridge", "host-local"):
        (node.folder / "bin" / name).unlink()
    await node.network.detach(by_theirs.id, by_theirs.path)
    by_theirs.close(), by_ours.close()
    await until(lambda: not [n for n in link_names() if n.startswith("veth")])
    assert not node.leases() and not [n for n in link_names() if n.startswith("veth")]
    assert host_rules.all_elements(host_rules.PORT_SETS) == []
