"""Tests the first two tasks of docs/tasks.md on a machine that never had our package: joining a
cluster, and finding out why a pod is slow. Also tests the package under systemd and a kubelet.

The machine is a guest; its cluster's control plane is on the host. Every block of those tasks is
run in the page's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.processes import wait_until
from tests.vm import newcomer
from tests.vm.conftest import LATER, Boots
from tests.vm.newcomer import NODE, PATIENCE_S, READY, Newcomer

pytestmark = [pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(3600)]

# A plugin in the chain that only sleeps.
SLOW_S = 5
SLOW_PLUGIN = f"""#!/bin/sh
[ "$CNI_COMMAND" != ADD ] || sleep {SLOW_S}
exec python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin).get("prevResult", {{}})))'
"""
NETWORK = "/etc/cni/net.d/10-pyrunc.conflist"


@pytest.fixture(scope="module")
def person(boots: Boots, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Boot a fresh guest that no other test uses before or afterwards."""
    with newcomer.at_a_new_machine(
        boots, tmp_path_factory.mktemp("control")
    ) as newcomer_at_machine:
        yield newcomer_at_machine


@pytest.fixture(scope="module")
def clean(person: Newcomer, debs: tuple[Path, Path]) -> set[str]:
    """Put the packages into /root, and return the state of the machine before the tasks."""
    newcomer.push(person.guest, debs[0], "/root/pyrunc_own.deb")
    newcomer.push(person.guest, debs[1], "/root/later/pyrunc_later.deb")
    # /root is not compared.
    return person.left()


@pytest.fixture(scope="module")
def node(person: Newcomer, clean: set[str]) -> Newcomer:
    """Run the blocks of the first task of docs/tasks.md, then a pod; return the machine."""
    install, token, join, nodes, look = documents.blocks("tasks.md", "Join a node to a cluster")
    output = person.types(install)
    assert "active (running)" in output and "serving at unix:///run/pyrunc/cri.sock" in output
    assert "WRONG" not in output and "kubelet waits for kubeadm" in output
    assert "This node has joined the cluster" in person.joins(
        join, person.types_on_the_control_plane(token)
    )
    person.until(READY, "True", "the node Ready")
    assert re.search(rf"{NODE} +Ready .*pyrunc://", person.types_on_the_control_plane(nodes))
    person.types("pyrunc-cri load /root/busybox.tar")
    person.runs_clock()
    output = person.types(look)
    assert re.search(r"default +clock-\S+ +ready", output) and re.search(
        r"clock-\S+ +main +running", output
    )
    return person


def test_the_unit_is_enabled_and_reports_its_readiness(node: Newcomer) -> None:
    output = node.types(
        "systemctl show -p Type -p UnitFileState -p NotifyAccess -p NRestarts pyrunc-cri"
    )
    assert {"Type=notify", "UnitFileState=enabled", "NotifyAccess=main", "NRestarts=0"} <= set(
        output.split()
    )


def test_the_journal_has_a_pods_calls(node: Newcomer) -> None:
    records = node.types("journalctl -u pyrunc-cri -o cat --no-pager")
    assert re.search(r"RunPodSandbox .*pod=default/clock-\S+ .*outcome=OK", records), records[
        -3000:
    ]
    assert "Traceback" not in records


def test_pods_live_through_an_upgrade_and_a_downgrade(node: Newcomer) -> None:
    before = node.clock()
    for packet, version in (("./later/pyrunc_later.deb", LATER), ("./pyrunc_own.deb", "0.1.0")):
        node.types(f"apt-get install -y --allow-downgrades {packet}")
        assert f"RuntimeVersion:     {version}" in node.types(
            "pyrunc-cri version; systemctl is-active pyrunc-cri"
        )
        after = node.clock()
        assert after.identity == before.identity, (
            "the same process, and kubelet has not restarted it"
        )
        assert wait_until(lambda: node.clock().count > after.count, PATIENCE_S, 2)  # noqa: B023


def test_the_documented_commands_show_why_a_pod_is_slow(node: Newcomer) -> None:
    slowest, one, log, explain = documents.blocks("tasks.md", "Find out why a pod is slow")
    chain = json.loads(node.types(f"cat {NETWORK}"))
    slow = {**chain, "plugins": [*chain["plugins"], {"type": "slow"}]}
    node.types(
        f"cat >/opt/cni/bin/slow <<'E'\n{SLOW_PLUGIN}E\nchmod +x /opt/cni/bin/slow\ncat >{NETWORK}"
        f" <<'E'\n{json.dumps(slow)}\nE\n"
    )
    node.restarts_clock()
    pod = node.clock().pod
    node.types(f"cat >{NETWORK} <<'E'\n{json.dumps(chain)}\nE\n")
    node.restarts_clock()  # a pod's DEL calls the same plugins as its ADD
    node.types("rm /opt/cni/bin/slow")
    assert f"RunPodSandbox default/{pod}" in node.types(slowest)
    output = node.types(one, NAMESPACE="default", POD=pod)
    took_ms = [  # ADD when the pod was made, DEL when it ended
        float(ms)
        for ms, name in re.findall(r"^ +([\d.]+) ms +[█·]+ +(.*?)(?: !)?$", output, re.MULTILINE)
        if name == "plugin slow"
    ]
    assert max(took_ms) > SLOW_S * 1000, output
    output = node.types(log, NAMESPACE="default", POD=pod)
    assert re.search(rf"RunPodSandbox .*pod=default/{pod}", output)
    result = re.findall(r"^(?:note|warning|WRONG) +([\w-]+):", output, re.MULTILINE)[0]
    assert result in node.types(explain, WORD=result)


def test_remove_is_refused_while_there_are_pods(node: Newcomer) -> None:
    with pytest.raises(RuntimeError, match=r"of this boot: stop kubelet"):
        node.types("apt-get remove -y pyrunc")
    assert "active" in node.types("systemctl is-active pyrunc-cri; pyrunc-cri ps -q")


def test_the_documented_removal_leaves_nothing(node: Newcomer, clean: set[str]) -> None:
    drain, leave = documents.blocks("install.md", "Leaving")
    node.types_on_the_control_plane(drain, NODE=NODE)
    node.types(leave)
    assert not node.left() - clean
