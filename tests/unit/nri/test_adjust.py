"""Tests that plugins' merged adjustments are applied to OCI configurations, and that the OCI
runtime's parser accepts the result."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import nri_pb2 as api
from cri_server.nri import adjust, convert
from pyrunc.errors import InvalidArgument
from pyrunc.spec.parse import parse

Adjustment = api.ContainerAdjustment
Linux = api.LinuxContainerAdjustment


def spec() -> dict[str, Any]:
    return {
        "ociVersion": "1.2.0",
        "root": {"path": "rootfs"},
        "process": {
            "args": ["sleep"],
            "cwd": "/",
            "env": ["PATH=/bin", "HOME=/"],
            "user": {"uid": 0, "gid": 0, "additionalGids": []},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 1}],
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/etc/hosts", "type": "bind", "source": "/h", "options": ["bind"]},
        ],
        "annotations": {"given": "1"},
        "linux": {
            "namespaces": [{"type": "mount"}, {"type": "uts", "path": "/proc/1/ns/uts"}],
            "resources": {"cpu": {"shares": 2}, "devices": [{"allow": False, "access": "rwm"}]},
            "cgroupsPath": "/a/b",
        },
    }


def applied(adjustment: Adjustment) -> dict[str, Any]:
    changed = spec()
    adjust.apply(
        changed, adjustment, lambda score: max(score, -500),
        lambda name: {"weight": len(name)}, lambda name: {"closID": name},
    )  # fmt: skip
    parse(changed)
    return changed


def test_all_adjustments_together_are_a_valid_configuration() -> None:
    changed = applied(
        Adjustment(
            annotations={"-given": "", "new": "2"},
            env=[
                api.KeyValue(key="-HOME"),
                api.KeyValue(key="PATH", value="/x"),
                api.KeyValue(key="N"),
            ],
            args=["true", "-v"],
            hooks=api.Hooks(create_runtime=[api.Hook(path="/h", timeout=api.OptionalInt(value=3))]),
            mounts=[
                api.Mount(destination="/etc", type="bind", source="/e", options=["rbind", "rslave"])
            ],
            rlimits=[
                api.POSIXRlimit(type="RLIMIT_NOFILE", soft=5, hard=6),
                api.POSIXRlimit(type="RLIMIT_CORE", soft=0, hard=0),
            ],
            linux=Linux(
                cgroups_path="/c/d",
                oom_score_adj=api.OptionalInt(value=-999),
                io_priority=api.LinuxIOPriority(**{"class": api.IOPRIO_CLASS_BE}, priority=3),
                scheduler=api.LinuxScheduler(
                    policy=api.SCHED_BATCH, nice=5, flags=[api.SCHED_FLAG_RESET_ON_FORK]
                ),
                seccomp_policy=api.LinuxSeccomp(
                    default_action="SCMP_ACT_ALLOW",
                    syscalls=[api.LinuxSyscall(names=["mount"], action="SCMP_ACT_ERRNO")],
                ),
                namespaces=[api.LinuxNamespace(type="-uts"), api.LinuxNamespace(type="cgroup")],
                sysctl={"net.ipv4.ip_forward": "1"},
                memory_policy=api.LinuxMemoryPolicy(mode=api.MPOL_BIND, nodes="0"),
                rdt=api.LinuxRdt(clos_id=api.OptionalString(value="gold")),
            ),
        )
    )
    process, linux = changed["process"], changed["linux"]
    assert changed["annotations"] == {"new": "2"}
    assert process["env"] == ["PATH=/x", "N="] and process["args"] == ["true", "-v"]
    assert changed["hooks"] == {
        "createRuntime": [{"path": "/h", "args": [], "env": [], "timeout": 3}]
    }
    assert [mount["destination"] for mount in changed["mounts"]] == ["/proc", "/etc", "/etc/hosts"]
    assert linux["rootfsPropagation"] == "rslave"
    assert [(limit["type"], limit["soft"]) for limit in process["rlimits"]] == [
        ("RLIMIT_NOFILE", 5),
        ("RLIMIT_CORE", 0),
    ]
    assert (linux["cgroupsPath"], process["oomScoreAdj"]) == ("/c/d", -500)
    assert process["ioPriority"] == {"class": "IOPRIO_CLASS_BE", "priority": 3}
    assert process["scheduler"] == {
        "policy": "SCHED_BATCH",
        "nice": 5,
        "flags": ["SCHED_FLAG_RESET_ON_FORK"],
    }
    assert linux["seccomp"]["syscalls"] == [
        {"names": ["mount"], "action": "SCMP_ACT_ERRNO", "args": []}
    ]
    assert [entry["type"] for entry in linux["namespaces"]] == ["mount", "cgroup"]
    assert linux["memoryPolicy"] == {"mode": "MPOL_BIND", "nodes": "0"}
    assert linux["intelRdt"] == {"closID": "gold"}


def test_devices_get_a_node_and_a_rule() -> None:
    device = api.LinuxDevice(
        path="/dev/x", type="c", major=1, minor=3, file_mode=api.OptionalFileMode(value=0o444)
    )
    changed = applied(Adjustment(linux=Linux(devices=[device])))
    assert changed["linux"]["devices"] == [
        {"path": "/dev/x", "type": "c", "major": 1, "minor": 3, "fileMode": 0o444}
    ]
    rule = {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "r"}
    assert changed["linux"]["resources"]["devices"][-1] == rule


def test_an_adjustment_sets_single_resources() -> None:
    resources = api.LinuxResources(
        memory=api.LinuxMemory(limit=api.OptionalInt64(value=1 << 20)),
        cpu=api.LinuxCPU(quota=api.OptionalInt64(value=5000), cpus="0-1"),
        pids=api.LinuxPids(limit=7),
        unified={"memory.high": "max"},
        hugepage_limits=[api.HugepageLimit(page_size="2MB", limit=0)],
        blockio_class=api.OptionalString(value="0123456789"),
    )
    changed = applied(Adjustment(linux=Linux(resources=resources)))["linux"]["resources"]
    assert changed["memory"] == {"limit": 1 << 20, "swap": 1 << 20}
    assert changed["cpu"] == {"shares": 2, "quota": 5000, "cpus": "0-1"}
    assert changed["pids"] == {"limit": 7} and changed["unified"] == {"memory.high": "max"}
    assert changed["blockIO"] == {"weight": 10}
    assert changed["hugepageLimits"] == [{"pageSize": "2MB", "limit": 0}]


def test_net_devices_are_moved_and_removed() -> None:
    device = api.LinuxNetDevice(name="eth1")
    changed = applied(
        Adjustment(linux=Linux(net_devices={"host0": device, "-gone": api.LinuxNetDevice()}))
    )
    assert changed["linux"]["netDevices"] == {"host0": {"name": "eth1"}}


@pytest.mark.parametrize(
    ("adjustment", "message"),
    [
        (Adjustment(mounts=[api.Mount(destination="/")]), "cannot mount at '/'"),
        (Adjustment(mounts=[api.Mount(destination="etc")]), "cannot mount at 'etc'"),
        (
            Adjustment(env=[api.KeyValue(key="A=B")]),
            "environment variable 'A': its name is empty or",
        ),
        (
            Adjustment(hooks=api.Hooks(prestart=[api.Hook(path="h")])),
            "hook 'h' is not an absolute path",
        ),
    ],
)
def test_invalid_adjustments_are_refused(adjustment: Adjustment, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        applied(adjustment)


def test_resources_are_converted_there_and_back() -> None:
    resources = {
        "memory": {"limit": 5, "swap": 6},
        "cpu": {"shares": 7, "quota": -1, "cpus": "0"},
        "unified": {"a": "b"},
    }
    message = convert.from_oci(resources)
    assert convert.from_cri(convert.to_cri(message)) == message
