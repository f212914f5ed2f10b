"""Tests that `pyrunc` writes limits that the kernel's own files confirm, and that the kernel
enforces them."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import bundle

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")


class Container:
    """A detached container; `group` is its cgroup as the kernel names it."""

    def __init__(self, folder: Path) -> None:
        self.id = f"limits-{uuid.uuid4().hex[:8]}"
        self.folder, self.state = folder, folder / "state"

    def pyrunc(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # the container keeps these
        with open(self.folder / "out", "w+") as out, open(self.folder / "err", "w+") as err:
            ended = subprocess.run(
                [*bundle.runtime(), "--root", str(self.state), *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False, timeout=120,
            )  # fmt: skip
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(ended.args, ended.returncode, out.read(), err.read())
        assert not check or done.returncode == 0, (
            f"pyrunc {arguments}: {done.returncode}: {done.stderr}"
        )
        return done

    def start(self, *command: str, resources: dict[str, Any]) -> None:
        config = bundle.configuration(
            *command, resources=resources, cgroupsPath=f"/pyrunc-test/{self.id}"
        )
        bundle.make(self.folder / "bundle", config)
        self.pyrunc("run", "-d", "--bundle", str(self.folder / "bundle"), self.id)

    @property
    def pid(self) -> int:
        return int(json.loads(self.pyrunc("state", self.id).stdout)["pid"])

    @property
    def group(self) -> Path:
        line = Path(f"/proc/{self.pid}/cgroup").read_text().strip()
        return CGROUPS / line.removeprefix("0::/")

    def read(self, file: str) -> str:
        return (self.group / file).read_text().strip()

    def sh(self, script: str) -> subprocess.CompletedProcess[str]:
        return self.pyrunc("exec", self.id, "sh", "-c", script, check=False)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    made.pyrunc("delete", "--force", made.id, check=False)
    assert not (CGROUPS / "pyrunc-test" / made.id).exists()


def test_limits_are_in_the_kernels_files(container: Container) -> None:
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


def test_update_changes_only_the_named_limits(container: Container) -> None:
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
    container: Container, quota: int, burst: int
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


def test_the_kernel_enforces_the_pids_limit(container: Container) -> None:
    container.start("sleep", "1000", resources={"pids": {"limit": 5}})
    done = container.sh("for i in 1 2 3 4 5 6 7 8; do sleep 5 & done; wait")
    assert "can't fork" in done.stderr
    assert int(dict(line.split() for line in container.read("pids.events").splitlines())["max"]) > 0


def test_the_kernel_throttles_at_the_cpu_limit(container: Container) -> None:
    container.start(
        "sh",
        "-c",
        "while true; do :; done",
        resources={"cpu": {"quota": 10_000, "period": 100_000}},
    )
    time.sleep(2)
    facts = dict(line.split() for line in container.read("cpu.stat").splitlines())
    assert int(facts["nr_throttled"]) > 3


def test_an_oom_kill_is_reported(container: Container) -> None:
    container.start("sleep", "1000", resources={"memory": {"limit": 16 * MIB, "swap": 16 * MIB}})
    container.sh("dd if=/dev/zero of=/dev/null bs=64M count=1")
    events = dict(line.split() for line in container.read("memory.events").splitlines())
    assert int(events["oom_kill"]) >= 1


@pytest.mark.requirement("14.8")
def test_a_container_of_six_mebibytes_starts(container: Container) -> None:
    container.start("sleep", "1000", resources={"memory": {"limit": 6 * MIB}})
    assert container.read("memory.max") == str(6 * MIB)


def test_the_device_filter_denies_and_allows(container: Container) -> None:
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


def test_a_container_is_frozen_and_thawed(container: Container) -> None:
    container.start("sh", "-c", "while true; do :; done", resources={})
    container.pyrunc("pause", container.id)
    assert container.read("cgroup.freeze") == "1"
    assert json.loads(container.pyrunc("state", container.id).stdout)["status"] == "paused"
    container.pyrunc("resume", container.id)
    assert container.read("cgroup.freeze") == "0"
