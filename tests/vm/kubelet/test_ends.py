"""Tests limits that end containers: memory, processes, ephemeral storage. All pods start in
parallel, since each takes long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube.pods import pod, shell
from tests.vm.kubelet.node import Node

HUNGRY = "dd if=/dev/zero of=/dev/null bs=64M count=1"
# A shell that cannot fork ends, hence the inner one; its output is read without another process.
FORKS = (
    "(for i in $(seq 600); do sleep 900 & done) 2>/said; read said </said; case $said in"
    " *temporarily*) exit 44;; esac"
)
SMALL = {"resources": {"limits": {"memory": "16Mi"}}}
FULL = {"resources": {"limits": {"ephemeral-storage": "2Mi"}}}
PODS = {
    "oom-main": pod("oom-main", shell(f"exec {HUNGRY}", **SMALL), restartPolicy="Never"),
    # memory.oom.group kills the whole group, so the shell does not outlive its child and exit with
    # 3
    "oom-child": pod("oom-child", shell(f"{HUNGRY}; exit 3", **SMALL), restartPolicy="Never"),
    "oom-again": pod("oom-again", shell(f"sleep 2; exec {HUNGRY}", **SMALL)),
    "forks": pod("forks", shell(FORKS), restartPolicy="Never"),
    "fills-disk": pod(
        "fills-disk",
        shell("dd if=/dev/zero of=/file bs=1M count=6; sleep 3600", **FULL),
        restartPolicy="Never",
    ),
}


@pytest.fixture(scope="module")
def ending(node: Node) -> Iterator[Node]:
    try:
        node.create(*PODS.values())
        yield node
    finally:
        node.remove(*PODS)


@pytest.mark.parametrize("name", ["oom-main", "oom-child"])
def test_an_oom_killed_container_says_so(ending: Node, name: str) -> None:
    ended = ending.ended(name)
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137), ended


def test_a_restarted_container_keeps_its_last_oom_kill(ending: Node) -> None:
    def restarted() -> bool:
        (status,) = ending.pod("oom-again")["status"]["containerStatuses"]
        return bool(status["restartCount"] and status["lastState"])

    ending.until(restarted, "a restart", "oom-again")
    (status,) = ending.pod("oom-again")["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert status["lastState"]["terminated"]["exitCode"] == 137


def test_processes_are_limited(ending: Node) -> None:
    # The script exits with 44 when fork fails with EAGAIN (podPidsLimit is 512).
    assert ending.ended("forks")["exitCode"] == 44


def test_ephemeral_storage_is_limited(ending: Node) -> None:
    """kubelet measures writable layers through our ContainerStats, and evicts a pod above its
    limit."""

    def evicted() -> bool:
        return bool(ending.pod("fills-disk")["status"].get("reason") == "Evicted")

    ending.until(evicted, "eviction", "fills-disk")
    assert "ephemeral local storage usage exceeds" in ending.pod("fills-disk")["status"]["message"]
