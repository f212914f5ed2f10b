"""Tests that the responses of several plugins are merged, shown to the next plugin, and checked for
conflicts."""

from __future__ import annotations

from typing import Any

import pytest

from cri_server.api import nri_pb2 as api
from cri_server.nri.merge import Merge
from cri_server.nri.owners import Conflict
from pyrunc.errors import PeerError

Adjustment = api.ContainerAdjustment
Linux = api.LinuxContainerAdjustment


def creation() -> Merge:
    container = api.Container(
        id="c",
        env=["PATH=/bin", "HOME=/"],
        args=["sleep"],
        annotations={"given": "1"},
        mounts=[api.Mount(destination="/data", source="/old")],
        linux=api.LinuxContainer(devices=[api.LinuxDevice(path="/dev/a", type="c")]),
    )
    return Merge(container=container)


def response(adjustment: Adjustment | None = None, **others: Any) -> api.CreateContainerResponse:
    return api.CreateContainerResponse(adjust=adjustment, **others)


EACH_KIND = {
    "annotations": Adjustment(annotations={"a": "1"}),
    "mounts": Adjustment(mounts=[api.Mount(destination="/m", source="/s")]),
    "env": Adjustment(env=[api.KeyValue(key="A", value="1")]),
    "args": Adjustment(args=["true"]),
    "rlimits": Adjustment(rlimits=[api.POSIXRlimit(type="RLIMIT_NOFILE", soft=1, hard=2)]),
    "CDI devices": Adjustment(CDI_devices=[api.CDIDevice(name="v.com/c=d")]),
    "devices": Adjustment(linux=Linux(devices=[api.LinuxDevice(path="/dev/x", type="c")])),
    "cgroups path": Adjustment(linux=Linux(cgroups_path="/x")),
    "oom score": Adjustment(linux=Linux(oom_score_adj=api.OptionalInt(value=0))),
    "io priority": Adjustment(linux=Linux(io_priority=api.LinuxIOPriority(priority=1))),
    "seccomp": Adjustment(
        linux=Linux(seccomp_policy=api.LinuxSeccomp(default_action="SCMP_ACT_ALLOW"))
    ),
    "namespaces": Adjustment(linux=Linux(namespaces=[api.LinuxNamespace(type="uts")])),
    "sysctl": Adjustment(linux=Linux(sysctl={"net.a": "1"})),
    "net devices": Adjustment(linux=Linux(net_devices={"eth9": api.LinuxNetDevice(name="eth1")})),
    "scheduler": Adjustment(linux=Linux(scheduler=api.LinuxScheduler(policy=api.SCHED_BATCH))),
    "rdt": Adjustment(linux=Linux(rdt=api.LinuxRdt(clos_id=api.OptionalString(value="x")))),
    "memory policy": Adjustment(
        linux=Linux(memory_policy=api.LinuxMemoryPolicy(mode=api.MPOL_BIND))
    ),
    "memory": Adjustment(
        linux=Linux(
            resources=api.LinuxResources(memory=api.LinuxMemory(limit=api.OptionalInt64(value=1)))
        )
    ),
    "cpu": Adjustment(
        linux=Linux(
            resources=api.LinuxResources(cpu=api.LinuxCPU(shares=api.OptionalUInt64(value=1)))
        )
    ),
    "cpus": Adjustment(linux=Linux(resources=api.LinuxResources(cpu=api.LinuxCPU(cpus="0")))),
    "pids": Adjustment(linux=Linux(resources=api.LinuxResources(pids=api.LinuxPids(limit=5)))),
    "unified": Adjustment(linux=Linux(resources=api.LinuxResources(unified={"memory.high": "1"}))),
    "huge pages": Adjustment(
        linux=Linux(
            resources=api.LinuxResources(
                hugepage_limits=[api.HugepageLimit(page_size="2MB", limit=1)]
            )
        )
    ),
    "rdt class": Adjustment(
        linux=Linux(resources=api.LinuxResources(rdt_class=api.OptionalString(value="gold")))
    ),
}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_each_kind_of_change_is_merged_and_two_plugins_conflict(kind: str) -> None:
    merge = creation()
    merge.add("00-a", response(EACH_KIND[kind]))
    assert merge.adjustment == EACH_KIND[kind]
    with pytest.raises(Conflict, match="NRI plugins 10-b and 00-a both set "):
        merge.add("10-b", response(EACH_KIND[kind]))


def test_changes_without_conflict_are_merged_and_seen_by_the_next_plugin() -> None:
    merge = creation()
    for number, adjustment in enumerate(EACH_KIND.values()):
        merge.add(f"{number:02d}-p", response(adjustment))
    for adjustment in EACH_KIND.values():
        for field, _ in adjustment.ListFields():
            assert (
                merge.adjustment.HasField(field.name)
                if not field.is_repeated
                else getattr(merge.adjustment, field.name)
            )
    assert list(merge.container.args) == ["true"] and "A=1" in merge.container.env
    assert merge.container.linux.resources.memory.limit.value == 1
    assert merge.owners.message.owners["c"].compound[api.Env].owners["A"] == "02-p"


def test_a_plugin_replaces_the_value_of_another_plugin_by_removing_the_value_first() -> None:
    merge = creation()
    merge.add("00-a", response(Adjustment(env=[api.KeyValue(key="A", value="1")], args=["one"])))
    removes = [api.KeyValue(key="-A"), api.KeyValue(key="A", value="2")]
    merge.add("10-b", response(Adjustment(env=removes, args=["", "two"])))
    assert [(e.key, e.value) for e in merge.adjustment.env] == [("A", "2")]
    assert list(merge.adjustment.args) == ["two"]
    with pytest.raises(Conflict):
        merge.add("20-c", response(Adjustment(args=["three"])))


def test_removals_reach_the_container_and_the_result() -> None:
    merge = creation()
    merge.add(
        "00-a",
        response(
            Adjustment(
                annotations={"-given": ""},
                env=[api.KeyValue(key="-HOME")],
                mounts=[api.Mount(destination="-/data")],
                linux=Linux(devices=[api.LinuxDevice(path="-/dev/a")]),
            )
        ),
    )
    assert (
        not merge.container.annotations
        and not merge.container.mounts
        and not merge.container.linux.devices
    )
    assert list(merge.container.env) == ["PATH=/bin"]
    assert merge.adjustment.annotations == {"-given": ""}
    assert (
        merge.adjustment.env[0].key == "-HOME"
        and merge.adjustment.mounts[0].destination == "-/data"
    )
    assert merge.adjustment.linux.devices[0].path == "-/dev/a"


def test_a_removal_deletes_the_entry_of_an_earlier_plugin() -> None:
    merge = creation()
    adjustment = Adjustment(
        annotations={"a": "1"},
        linux=Linux(sysctl={"net.a": "1"}, net_devices={"e": api.LinuxNetDevice()}),
    )
    merge.add("00-a", response(adjustment))
    taken = Adjustment(
        annotations={"-a": ""},
        linux=Linux(sysctl={"-net.a": ""}, net_devices={"-e": api.LinuxNetDevice()}),
    )
    merge.add("10-b", response(taken))
    assert merge.adjustment == taken
    assert merge.owners.message.owners["c"].compound[api.Annotations].owners["a"] == "-10-b"


def test_hooks_of_all_plugins_are_kept() -> None:
    merge = creation()
    for name in ("a", "b"):
        hooks = api.Hooks(poststart=[api.Hook(path=f"/{name}")])
        merge.add(f"00-{name}", response(Adjustment(hooks=hooks)))
    assert [hook.path for hook in merge.adjustment.hooks.poststart] == ["/a", "/b"]
    assert merge.owners.message.owners["c"].simple[api.OciHooks] == "00-a,00-b"


def shares(container: str, value: int, *, ignore: bool = False) -> api.ContainerUpdate:
    cpu = api.LinuxCPU(shares=api.OptionalUInt64(value=value))
    linux = api.LinuxContainerUpdate(resources=api.LinuxResources(cpu=cpu))
    return api.ContainerUpdate(container_id=container, linux=linux, ignore_failure=ignore)


def test_updates_of_other_containers_conflict_too_unless_failures_are_ignored() -> None:
    merge = creation()
    merge.add("00-a", response(update=[shares("other", 1)]))
    merge.add("10-b", response(update=[shares("other", 2, ignore=True)]))
    assert merge.updates["other"].linux.resources.cpu.shares.value == 1
    with pytest.raises(Conflict, match="CPUShares"):
        merge.add("20-c", response(update=[shares("other", 3)]))
    with pytest.raises(PeerError, match="that is being created"):
        merge.add("30-d", response(update=[shares("c", 1)]))


def test_an_update_changes_the_requested_limits_and_other_containers() -> None:
    requested = api.LinuxResources(cpu=api.LinuxCPU(shares=api.OptionalUInt64(value=100)))
    merge = Merge(updated="c", limits=requested)
    answer = api.UpdateContainerResponse(
        update=[shares("c", 7), shares("d", 8)], evict=[api.ContainerEviction(container_id="e")]
    )
    merge.add("00-a", answer)
    assert requested.cpu.shares.value == 7 and list(merge.updates) == ["d"]
    assert [eviction.container_id for eviction in merge.evictions] == ["e"]
