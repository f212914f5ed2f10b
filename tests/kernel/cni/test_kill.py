"""Tests plugins that are killed at any moment, or start twenty at a time: DEL leaves nothing, and
no two pods share an address."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cni_plugins.bridge.plugin import PLUGIN as BRIDGE
from cni_plugins.net import host_rules
from cni_plugins.portmap.plugin import PLUGIN as PORTMAP
from cni_plugins.skel import CniPlugin, answer
from tests.kernel.cni.harness import (
    Host,
    Pod,
    all_elements,
    attach,
    call,
    link_names,
    portmap_config,
)
from tests.kernel.cni.test_bridge import leases, wait_until

WEB = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}


def requests_of(pod: Pod) -> dict[str, str]:
    return {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": pod.id,
        "CNI_NETNS": pod.path,
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/nowhere",
    }


@contextmanager
def child(
    plugin: CniPlugin, pod: Pod, config: dict[str, Any], output: Path | None = None
) -> Iterator[int]:
    """Run ADD of `plugin` in a forked child; yield its pid."""
    pid = os.fork()
    if pid == 0:
        code, content = answer(plugin, requests_of(pod), json.dumps(config).encode())
        if output is not None:
            output.write_bytes(content)
        os._exit(code)
    try:
        yield pid
    finally:
        os.waitpid(pid, 0)


def veths() -> set[str]:
    return {name for name in link_names() if name.startswith("veth")}


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_bridge_leaves_nothing_that_blocks(host: Host, seed: int) -> None:
    config = host.bridge_config(ipMasq=True)
    first = host.pod("first")
    attach(first, config)
    dice = random.Random(seed)
    mine = leases(host)
    survivors = 0
    for number in range(25):
        pod = host.pod(f"k{number}")
        with child(BRIDGE, pod, config) as pid:
            if number % 5 == 4:  # whatever the machine's speed, some are killed in the middle
                wait_until(lambda: leases(host) - mine)
            time.sleep(dice.uniform(0, 0.008))
            os.kill(pid, signal.SIGKILL)
        survivors += bool(leases(host) - mine)
        call(BRIDGE, "DEL", pod, config, netns_path=pod.path if number % 2 else "")
        assert {e.comment for e in all_elements()} == {"net/first/eth0"}
        assert leases(host) == {"10.88.0.2", "fd88::2"}
        assert len(veths()) == 1
        pod.close()
    assert survivors >= 5 and mine == {"10.88.0.2", "fd88::2"}
    call(BRIDGE, "CHECK", first, {**config, "prevResult": recorded(host, first)})


def recorded(host: Host, pod: Pod) -> dict[str, Any]:
    return {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "sandbox": pod.path}],
        "ips": [
            {"address": "10.88.0.2/16", "interface": 0},
            {"address": "fd88::2/64", "interface": 0},
        ],
    }


def test_a_kill_during_the_first_add_is_repaired_by_the_next(tmp_path: Path, host: Host) -> None:
    config = host.bridge_config(ipMasq=True, bridge="cni0")
    for number in range(12):
        pod = host.pod(f"k{number}")
        with child(BRIDGE, pod, config) as pid:
            time.sleep(number * 0.003)
            # The bridge and the rules may be half made.
            os.kill(pid, signal.SIGKILL)
        call(BRIDGE, "DEL", pod, config)
        assert not veths() and not leases(host) and not all_elements()
        other = host.pod(f"n{number}")
        result = attach(other, config)
        call(BRIDGE, "CHECK", other, {**config, "prevResult": result})
        call(BRIDGE, "DEL", other, {**config, "prevResult": result})
        from tests.kernel.cni.harness import delete_link, nft

        delete_link("cni0")
        nft("delete", "table", "inet", host_rules.TABLE)


def test_a_killed_portmap_leaves_nothing_that_blocks(host: Host) -> None:
    pod = host.pod()
    previous = attach(pod, host.bridge_config())
    config = portmap_config(previous, WEB, {**WEB, "hostPort": 8081})
    for number in range(20):
        with child(PORTMAP, pod, config) as pid:
            time.sleep(number * 0.0002)
            os.kill(pid, signal.SIGKILL)
        opened = {e.set_name for e in all_elements()}
        # all of a request or nothing
        assert opened in (set(), {"ports4", "ports6", "near4", "near6"})
        call(PORTMAP, "DEL", pod, config)
        assert all_elements() == []


def at_once(folder: Path, jobs: list[tuple[str, Pod, dict[str, Any]]]) -> list[Any]:
    """Return the bridge plugin's answers to (command, pod, config), each in a forked child, all in
    parallel."""
    running = []
    for number, (command, pod, config) in enumerate(jobs):
        pid = os.fork()
        if pid == 0:
            request = {**requests_of(pod), "CNI_COMMAND": command}
            code, content = answer(BRIDGE, request, json.dumps(config).encode())
            (folder / f"{command}-{number}").write_bytes(content)
            os._exit(code)
        running.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
    contents = [
        (folder / f"{command}-{number}").read_bytes() for number, (command, _, _) in enumerate(jobs)
    ]
    answers = [json.loads(content) if content else None for content in contents]
    assert codes == [0] * len(jobs), [answer for answer in answers if answer and "code" in answer]
    return answers


def test_twenty_adds_at_once_create_one_bridge(host: Host, tmp_path: Path) -> None:
    config = host.bridge_config(ipMasq=True, hairpinMode=True)
    pods = [host.pod() for _ in range(20)]
    results = at_once(tmp_path, [("ADD", pod, config) for pod in pods])
    assert len({ip["address"] for result in results for ip in result["ips"]}) == 40
    assert len({result["interfaces"][0]["mac"] for result in results}) == 1
    for pod, result in zip(pods, results, strict=True):
        call(BRIDGE, "CHECK", pod, {**config, "prevResult": result})
        call(
            BRIDGE,
            "DEL",
            pod,
            {**config, "prevResult": result, "args": {"cni": {"teardown": "background"}}},
        )
        pod.close()
    wait_until(lambda: not veths())
    assert not leases(host) and not all_elements()


def test_pods_are_checked_while_others_come_and_go(host: Host, tmp_path: Path) -> None:
    config = host.bridge_config(ipMasq=True)
    pods = [host.pod() for _ in range(15)]
    staying, leaving, coming = pods[:5], pods[5:10], pods[10:]
    results = {pod.id: attach(pod, config) for pod in (*staying, *leaving)}
    previous = {pod.id: {**config, "prevResult": results[pod.id]} for pod in (*staying, *leaving)}
    jobs = [("CHECK", pod, previous[pod.id]) for pod in staying for _ in range(2)]
    jobs += [("DEL", pod, previous[pod.id]) for pod in leaving] + [
        ("ADD", pod, config) for pod in coming
    ]
    at_once(tmp_path, jobs[::2] + jobs[1::2])
    assert {e.comment for e in all_elements()} == {
        f"net/{pod.id}/eth0" for pod in (*staying, *coming)
    }
    assert len(leases(host)) == 2 * len((*staying, *coming)) and len(veths()) == 10
    for pod in pods:
        call(BRIDGE, "DEL", pod, config)
