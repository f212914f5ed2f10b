"""Tests the systemd driver of `pyrunc`: a delegated scope, limits that systemd knows too, and
nothing left after delete."""

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
from tests.vm.inside.detached import CGROUPS, MIB, DetachedContainer


class Scope(DetachedContainer):
    """A container in `sdtest-….slice`; `unit` is its scope."""

    def __init__(self, folder: Path) -> None:
        identifier = uuid.uuid4().hex[:8]
        self.unit = f"box-{identifier}.scope"
        super().__init__(
            folder, identifier, f"sdtest.slice:box:{identifier}", ("--systemd-cgroup",)
        )

    def property(self, name: str) -> str:
        return systemctl("show", "--value", "-p", name, self.unit)


def systemctl(*words: str) -> str:
    return subprocess.run(
        ["systemctl", *words], capture_output=True, text=True, check=False
    ).stdout.strip()


@pytest.fixture
def scope(tmp_path: Path) -> Iterator[Scope]:
    detached = Scope(tmp_path)
    yield detached
    detached.pyrunc("delete", "--force", detached.id)
    assert not (CGROUPS / "sdtest.slice" / detached.unit).exists()
    assert systemctl("is-active", detached.unit) == "inactive"
    assert "not-found" in systemctl("show", "-p", "LoadState", detached.unit)
    systemctl("stop", "sdtest.slice")


LIMITS: dict[str, Any] = {
    "memory": {"limit": 64 * MIB, "swap": 64 * MIB},
    "cpu": {"shares": 512, "quota": 50_000, "period": 100_000},
    "pids": {"limit": 42},
    "devices": [{"allow": False, "access": "rwm"}],
}


def test_the_container_lives_in_a_delegated_scope(scope: Scope) -> None:
    scope.start("sleep", "1000")
    assert scope.group == CGROUPS / "sdtest.slice" / scope.unit
    assert scope.property("ActiveState") == "active" and scope.property("Delegate") == "yes"
    assert scope.property("Slice") == "sdtest.slice"
    assert len(scope.read("cgroup.procs").split()) == 1


def test_limits_are_in_the_files_and_in_systemds_properties(scope: Scope) -> None:
    scope.start("sleep", "1000", resources=LIMITS)
    for _ in range(2):
        assert scope.read("memory.max") == str(64 * MIB) and scope.read("memory.swap.max") == "0"
        assert scope.read("cpu.max") == "50000 100000" and scope.read("cpu.weight") == "59"
        assert scope.read("pids.max") == "42"
        systemctl("daemon-reload")
    assert scope.property("MemoryMax") == str(64 * MIB) and scope.property("TasksMax") == "42"
    assert scope.property("CPUWeight") == "59" and scope.property("CPUQuotaPerSecUSec") == "500ms"


def test_the_device_filter_outlives_a_reload(scope: Scope) -> None:
    scope.start("sleep", "1000", resources=LIMITS)
    systemctl("daemon-reload")
    pid = scope.pid
    subprocess.run(["mknod", f"/proc/{pid}/root/dev/mem", "c", "1", "1"], check=True)
    denied = scope.pyrunc("exec", scope.id, "sh", "-c", ": </dev/mem", check=False)
    assert "not permitted" in denied.stderr


def test_update_reaches_systemd_and_the_files(scope: Scope) -> None:
    scope.start("sleep", "1000", resources=LIMITS)
    scope.pyrunc(
        "update", "--memory", "128m", "--memory-swap", "128m", "--pids-limit", "50", scope.id
    )
    systemctl("daemon-reload")
    assert scope.read("memory.max") == str(128 * MIB) and scope.read("pids.max") == "50"
    assert scope.property("MemoryMax") == str(128 * MIB) and scope.property("TasksMax") == "50"
    assert scope.read("cpu.weight") == "59"


def test_exec_joins_the_scope_and_pause_freezes_the_scope(scope: Scope) -> None:
    scope.start("sleep", "1000")
    inside = scope.pyrunc("exec", scope.id, "cat", "/proc/self/cgroup").stdout
    assert inside.strip() == "0::/"
    scope.pyrunc("pause", scope.id)
    assert scope.read("cgroup.freeze") == "1"
    scope.pyrunc("resume", scope.id)
    assert scope.read("cgroup.freeze") == "0"


def test_the_scope_ends_with_the_program(scope: Scope) -> None:
    scope.start("true")
    for _ in range(100):
        if json.loads(scope.pyrunc("state", scope.id).stdout)["status"] == "stopped":
            break
        time.sleep(0.1)
    scope.pyrunc("delete", scope.id)


def test_annotations_set_properties(scope: Scope) -> None:
    key = "org.systemd.property."
    scope.start(
        "sleep", "1000", annotations={f"{key}TimeoutStopSec": "7", f"{key}Description": "'a box'"}
    )
    assert scope.property("TimeoutStopUSec") == "7s" and scope.property("Description") == "a box"


def test_a_refused_create_leaves_no_unit(scope: Scope) -> None:
    config = bundle.configuration("nosuchprogram", cgroupsPath=f"sdtest.slice:box:{scope.id}")
    bundle.make(scope.folder / "bundle", config)
    failed = scope.pyrunc("create", "--bundle", str(scope.folder / "bundle"), scope.id, check=False)
    assert "executable file not found" in failed.stderr
    assert not (CGROUPS / "sdtest.slice" / scope.unit).exists()


def test_another_path_shape_is_refused(scope: Scope) -> None:
    bundle.make(scope.folder / "bundle", bundle.configuration("true", cgroupsPath="/plain/path"))
    failed = scope.pyrunc("create", "--bundle", str(scope.folder / "bundle"), scope.id, check=False)
    assert failed.returncode == 1 and "slice:prefix:name" in failed.stderr
