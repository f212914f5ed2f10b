"""Tests that after random faults of CNI plugins, zygote and server, `reconcile` leaves nothing of
dead pods behind and keeps living ones intact."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from cri_server.network.model import PortMapping
from cri_server.network.names import remove as remove_name
from cri_server.network.service import NetworkService
from pyrunc.errors import Error
from tests.cri.network.conftest import Node, until
from tests.kernel.cni.harness import Host, Pod, all_elements, link_names, nft

RESULT_OF_OURS = (
    "python3 -IS -c 'import json,sys;print(json.dumps(json.load(sys.stdin)[\"prevResult\"]))'"
)
FAULTS = {
    "none": "true",
    "add fails": '[ "$CNI_COMMAND" = ADD ] && exit 1',
    "del fails": '[ "$CNI_COMMAND" = DEL ] && exit 1',
    "add hangs": '[ "$CNI_COMMAND" = ADD ] && sleep 100',
    "add crashes": '[ "$CNI_COMMAND" = ADD ] && kill -9 $$',
    "garbage": '[ "$CNI_COMMAND" = ADD ] && { echo garbage; exit 0; }',
}


@pytest.mark.parametrize("seed", range(3))
async def test_hundreds_of_faults_leave_nothing_behind(node: Node, seed: int) -> None:
    dice = random.Random(seed)
    node.restart(timeout_s=0.4)
    node.configure(
        node.bridge(),
        {"type": "moody"},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    )
    living: dict[str, Pod] = {}
    for number in range(60):
        fault = dice.choice(list(FAULTS)) if dice.random() < 0.5 else "none"
        node.plugin(
            "moody", f'{FAULTS[fault]}\n[ "$CNI_COMMAND" = ADD ] || exit 0\n{RESULT_OF_OURS}'
        )
        if living and dice.random() < 0.4:
            await remove(node, living, dice)
        else:
            await add(node, living, dice, number)
        if dice.random() < 0.1:
            node.restart()
        if dice.random() < 0.1:
            nft("flush", "ruleset")
        if dice.random() < 0.05 and node.zygote.pid:
            os.kill(node.zygote.pid, signal.SIGKILL)
    node.plugin("moody", f'[ "$CNI_COMMAND" = ADD ] || exit 0\n{RESULT_OF_OURS}')
    node.restart(timeout_s=20.0)
    assert await node.network.reconcile(lambda: living) == []
    assert node.recorded() == set(living)
    assert {e.comment.split("/")[1] for e in all_elements()} == set(living)
    assert len(node.leases()) == len(living)
    for name, pod in list(living.items()):
        await node.check(name)
        await node.network.detach(name, pod.path)
    for pod in node.host.pods:
        pod.close()
    await until(lambda: not [n for n in link_names() if n.startswith("veth")])
    assert not all_elements() and not node.leases() and not node.recorded()


async def add(node: Node, living: dict[str, Pod], dice: random.Random, number: int) -> None:
    """Attach a new pod, or cancel the call halfway. Add the pod to `living` if it is attached."""
    pod = node.host.pod(f"p{number}")
    task = asyncio.ensure_future(node.attach(pod, port_mappings=(PortMapping(8000 + number, 80),)))
    if dice.random() < 0.3:
        await asyncio.sleep(dice.uniform(0, 0.02))
        task.cancel()
    try:
        await task
    except (Error, asyncio.CancelledError):
        pod.close()
    else:
        living[pod.id] = pod


async def remove(node: Node, living: dict[str, Pod], dice: random.Random) -> None:
    """Detach a random pod of `living`, or try to, sometimes after its namespace has gone."""
    name = dice.choice(sorted(living))
    pod = living.pop(name)
    gone = dice.random() < 0.3
    if gone:
        pod.close()
    try:
        await node.network.detach(name, None if gone else pod.path)
    except Error:
        assert name in node.recorded()
    pod.close()


async def test_a_second_server_on_the_same_network_keeps_its_pods(node: Node, host: Host) -> None:
    """The servers share a bridge, a folder of leases and an nftables table; each removes remains of
    its own pods only."""
    mine, theirs = host.pod("mine"), host.pod("theirs")
    await node.attach(mine, port_mappings=(PortMapping(8080, 80),))
    first_state = node.folder / "state"
    first_state.rename(node.folder / "kept")
    node.network.close()
    node.network = NetworkService(
        str(node.folder / "conf"),
        str(node.folder / "bin"),
        str(node.folder / "other"),
        node.zygote,
        netns_dir=str(node.folder / "netns"),
        default=node.network._configuration._default,
    )
    await node.attach(theirs, port_mappings=(PortMapping(8081, 80),))
    assert await node.network.reconcile(lambda: [theirs.id]) == []
    assert {e.comment.split("/")[1] for e in all_elements()} == {"mine", "theirs"}
    (node.folder / "kept").rename(first_state)
    node.restart()
    await node.check(mine.id)
    await node.network.detach(mine.id, mine.path)
    assert {e.comment.split("/")[1] for e in all_elements()} == {"theirs"}


async def test_a_left_over_masquerade_rule_is_replaced_by_the_next_owner_of_the_address(
    node: Node,
) -> None:
    first, second = node.host.pod(), node.host.pod()
    await node.attach(first)
    for lease in node.folder.glob("leases/*/*"):
        lease.unlink() if lease.is_file() else None
    first.close()
    remove_name(node.name_of(first))
    await until(lambda: not [n for n in link_names() if n.startswith("veth")])
    assert (await node.attach(second)).ips == ("10.85.0.2", "fd85::2")
    assert {e.comment.split("/")[1] for e in all_elements()} == {second.id}
    await node.network.detach(first.id)
    assert {e.comment.split("/")[1] for e in all_elements()} == {second.id}
    await node.check(second.id)
