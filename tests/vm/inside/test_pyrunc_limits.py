"""Tests that `pyrunc` writes limits that the kernel's own files confirm, and that the kernel
enforces them."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.inside.detached import CGROUPS, MIB, DetachedContainer


def limited_container(folder: Path) -> DetachedContainer:
    identifier = f"limits-{uuid.uuid4().hex[:8]}"
    return DetachedContainer(folder, identifier, f"/pyrunc-test/{identifier}")


@pytest.fixture
def container(tmp_path: Path) -> Iterator[DetachedContainer]:
    detached = limited_container(tmp_path)
    yield detached
    detached.pyrunc("delete", "--force", detached.id, check=False)
    assert not (CGROUPS / "pyrunc-test" / detached.id).exists()


def test_limits_are_in_the_kernels_files(container: DetachedContainer) -> None:
    resources = {
        "memory": {"limit": 64 * MIB, "reservation": 32 * MIB, "swap": 96 * MIB},
        "cpu": {"shares": 512, "quota": 50_000, "period": 100_000, "cpus": "0", "mems": "0"},
        "pids": {"limit": 42},
        "unified": {"memory.high": str(60 * MIB)},
    }
    container.start("sleep", "1000", resources=resources)
    assert container.read("memory.max") == str(64 * MIB)
    assert container.read("memory.low") == str(32 * MIB)
    assert container.read("memory.swap.max") == str(32 * MIB)
    assert container.read("memory.high") == str(60 * MIB)
    assert container.read("cpu.max") == "50000 100000"
    assert container.read("cpuset.cpus.effective") == "0"
    assert container.read("cpuset.mems.effective") == "0"
    assert container.read("pids.max") == "42"
    assert 1 < int(container.read("cpu.weight")) < 100


def test_update_changes_only_the_named_limits(container: DetachedContainer) -> None:
    container.start(
        "sleep", "1000", resources={"memory": {"limit": 64 * MIB}, "pids": {"limit": 42}}
    )
    container.pyrunc(
        "update",
        "--memory",
        str(128 * MIB),
        "--cpu-quota",
        "20000",
        "--cpu-period",
        "50000",
        container.id,
    )
    assert container.read("memory.max") == str(128 * MIB)
    assert container.read("cpu.max") == "20000 50000"
    assert container.read("pids.max") == "42"


@pytest.mark.parametrize(("quota", "burst"), [(20_000, 10_000), (400_000, 200_000)])
def test_quota_and_burst_are_set_together_and_restored_together(
    container: DetachedContainer, quota: int, burst: int
) -> None:
    container.start("sleep", "1000", resources={"cpu": {"quota": 100_000, "burst": 50_000}})
    resources = {"cpu": {"quota": quota, "burst": burst}, "unified": {"memory.high": "nonsense"}}
    request = container.folder / "resources.json"
    request.write_text(json.dumps(resources))
    failed = container.pyrunc("update", "-r", str(request), container.id, check=False)
    assert "memory.high" in failed.stderr and "restore" not in failed.stderr
    assert container.read("cpu.max") == "100000 100000"
    assert container.read("cpu.max.burst") == "50000"
    container.pyrunc(
        *("update", "--cpu-quota", str(quota), "--cpu-burst", str(burst)), container.id
    )
    assert container.read("cpu.max") == f"{quota} 100000"
    assert container.read("cpu.max.burst") == str(burst)


def test_the_kernel_enforces_the_pids_limit(container: DetachedContainer) -> None:
    container.start("sleep", "1000", resources={"pids": {"limit": 5}})
    done = container.sh("for i in 1 2 3 4 5 6 7 8; do sleep 5 & done; wait")
    assert "can't fork" in done.stderr
    assert int(dict(line.split() for line in container.read("pids.events").splitlines())["max"]) > 0


def test_the_kernel_throttles_at_the_cpu_limit(container: DetachedContainer) -> None:
    container.start(
        "sh",
        "-c",
        "while true; do :; done",
        resources={"cpu": {"quota": 10_000, "period": 100_000}},
    )
    time.sleep(2)
    facts = dict(line.split() for line in container.read("cpu.stat").splitlines())
    assert int(facts["nr_throttled"]) > 3


def test_an_oom_kill_is_reported(container: DetachedContainer) -> None:
    container.start("sleep", "1000", resources={"memory": {"limit": 16 * MIB, "swap": 16 * MIB}})
    container.sh("dd if=/dev/zero of=/dev/null bs=64M count=1")
    events = dict(line.split() for line in container.read("memory.events").splitlines())
    assert int(events["oom_kill"]) >= 1


@pytest.mark.requirement("14.8")
def test_a_container_of_six_mebibytes_starts(container: DetachedContainer) -> None:
    container.start("sleep", "1000", resources={"memory": {"limit": 6 * MIB}})
    assert container.read("memory.max") == str(6 * MIB)


def test_the_device_filter_denies_and_allows(container: DetachedContainer) -> None:
    devices = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 4, "minor": 64, "access": "r"},
    ]
    container.start("sleep", "1000", resources={"devices": devices})
    for node, major, minor in (("ttyS0", 4, 64), ("mem", 1, 1)):
        root = Path(f"/proc/{container.pid}/root/dev")
        subprocess.run(["mknod", str(root / node), "c", str(major), str(minor)], check=True)
    assert container.sh("head -c 1 /dev/null; head -c 8 /dev/zero | wc -c").stdout.strip() == "8"
    assert container.sh(": </dev/ttyS0").returncode == 0
    assert "not permitted" in container.sh(": >/dev/ttyS0").stderr
    assert "not permitted" in container.sh(": </dev/mem").stderr


def test_a_container_is_frozen_and_thawed(container: DetachedContainer) -> None:
    container.start("sh", "-c", "while true; do :; done", resources={})
    container.pyrunc("pause", container.id)
    assert container.read("cgroup.freeze") == "1"
    assert json.loads(container.pyrunc("state", container.id).stdout)["status"] == "paused"
    container.pyrunc("resume", container.id)
    assert container.read("cgroup.freeze") == "0"
