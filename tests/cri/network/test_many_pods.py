"""Tests many pods at once: each gets its own addresses, and few worker processes serve all."""

from __future__ import annotations

import asyncio

import pytest

from cri_server.network.model import PortMapping
from cri_server.zygote import workers
from pyrunc.errors import PeerError
from pyrunc.zygote.descendants import below
from tests.bench import memory
from tests.cri.network.conftest import ADD_ONLY, Node, clean, until


async def test_twenty_pods_are_attached_at_once(node: Node) -> None:
    pods = [node.host.pod() for _ in range(20)]
    results = await asyncio.gather(
        *(
            node.attach(pod, port_mappings=(PortMapping(9000 + i, 80),))
            for i, pod in enumerate(pods)
        )
    )
    assert len({ip for result in results for ip in result.ips}) == 40
    # one by one: a worker that checks imports pyroute2 first, which takes a while
    for pod in pods[::5]:
        await node.check(pod.id)
    await asyncio.gather(*(node.network.detach(pod.id, pod.path) for pod in pods))
    for pod in pods:
        pod.close()
    await until(lambda: clean(node))


async def test_many_pods_at_once_have_few_workers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    run = node.zygote.run
    # on a machine that is busy otherwise all take long
    monkeypatch.setattr(workers, "LONG_S", 60.0)
    monkeypatch.setattr(
        node.zygote, "run", lambda *call, **more: started.append(call) or run(*call, **more)
    )
    pods = [node.host.pod() for _ in range(30)]
    await asyncio.gather(*(node.attach(pod) for pod in pods))
    await asyncio.gather(*(node.network.detach(pod.id, pod.path) for pod in pods))
    assert 1 <= len(started) <= 4


async def test_pods_that_wait_for_a_slow_address_plugin_delay_no_other(node: Node) -> None:
    """Requests that wait long for a plugin do not count towards the limit of workers: the sixth pod
    does not wait for the first five."""
    node.plugin(
        "slow-ipam",
        f"{ADD_ONLY}; echo began >>$LOG; until [ -e {node.folder}/go ]; do sleep 0.1; done\n"
        'echo \'{"cniVersion":"1.1.0","code":99,"msg":"no"}\'; exit 1',
    )
    node.configure(node.bridge(ipam={"type": "slow-ipam"}))
    slow = [asyncio.ensure_future(node.attach(node.host.pod())) for _ in range(5)]
    await until(lambda: node.log().count("began") >= 4)
    node.configure(node.bridge(), file="05-quick.conflist", name="quick")
    await node.attach(node.host.pod())
    assert not any(task.done() for task in slow)
    (node.folder / "go").touch()
    assert all(
        isinstance(outcomes, PeerError)
        for outcomes in await asyncio.gather(*slow, return_exceptions=True)
    )


async def test_a_worker_that_has_grown_is_replaced(node: Node) -> None:
    pod = node.host.pod()
    await node.attach(pod)
    # GC (in the first reconcile) and CHECK import pyroute2, 20 MiB that no other request needs.
    await node.network.reconcile(lambda: [pod.id])
    await node.check(pod.id)
    assert node.zygote.pid is not None
    await until(
        lambda: all(memory.private_kib([pid]) < 8 * 1024 for pid in below(node.zygote.pid or 0))
    )
    await node.network.detach(pod.id, pod.path)
    pod.close()
    await until(lambda: clean(node))
