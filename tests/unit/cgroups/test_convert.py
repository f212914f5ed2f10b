"""Tests the conversion of OCI resources: the content of each cgroup file, and the order of
writes."""

from __future__ import annotations

from typing import Any

import pytest

from pyrunc.cgroups.convert import CgroupSetting, io_weight, settings, swap_max, warnings, weight
from pyrunc.errors import InvalidSpec, Unsupported


def written(
    resources: dict[str, Any], files: dict[str, str] | None = None
) -> list[tuple[str, str]]:
    return [(s.file, s.content) for s in settings(resources, (files or {}).get)]


@pytest.mark.requirement("7.2.2")
@pytest.mark.parametrize(
    ("shares", "expected"),
    [(0, 1), (1, 1), (2, 1), (3, 2), (10, 4), (100, 17), (102, 17), (512, 59), (1000, 99), (1024,
    100), (2048, 174),
     (262143, 10000), (262144, 10000), (1 << 40, 10000)],
)  # fmt: skip
def test_shares_become_weight_by_the_formula_of_runc(shares: int, expected: int) -> None:
    assert weight(shares) == expected


def test_weight_never_falls_and_stays_in_range() -> None:
    weights = [weight(shares) for shares in range(2, 262145, 97)]
    assert weights == sorted(weights) and weights[0] >= 1 and weights[-1] <= 10000


@pytest.mark.parametrize(("value", "expected"), [(10, 1), (500, 4950), (1000, 10000)])
def test_io_weight_is_linear(value: int, expected: int) -> None:
    assert io_weight(value) == expected


@pytest.mark.requirement("7.2.4")
@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({}, None),
        ({"limit": 100}, None),
        ({"limit": 100, "swap": 100}, 0),
        ({"limit": 100, "swap": 250}, 150),
        ({"limit": 100, "swap": -1}, -1),
        ({"limit": -1}, -1),
        ({"limit": -1, "swap": 500}, 500),
        ({"swap": -1}, -1),
    ],
)
def test_the_swap_limit_is_the_part_above_the_memory_limit(
    memory: dict[str, int], expected: int | None
) -> None:
    assert swap_max(memory) == expected


@pytest.mark.parametrize("memory", [{"swap": 100}, {"limit": 100, "swap": 99}])
def test_contradictions_of_memory_and_swap_are_refused(memory: dict[str, int]) -> None:
    with pytest.raises(InvalidSpec, match="swap"):
        swap_max(memory)


def test_equal_limit_and_swap_write_a_zero_never_an_empty_string() -> None:
    assert written({"memory": {"limit": 4096, "swap": 4096}}) == [
        ("memory.swap.max", "0"),
        ("memory.max", "4096"),
    ]


@pytest.mark.requirement("7.2.5")
def test_order_is_swap_limit_then_unified_last() -> None:
    resources = {
        "unified": {"memory.high": "9"},
        "memory": {"limit": 10, "swap": 20, "reservation": 5},
        "pids": {"limit": 3},
    }
    assert written(resources) == [
        ("memory.swap.max", "10"),
        ("memory.max", "10"),
        ("memory.low", "5"),
        ("pids.max", "3"),
        ("memory.high", "9"),
    ]


@pytest.mark.parametrize(
    ("cpu", "before", "expected"),
    [
        ({"quota": 50000, "period": 200000}, None, "50000 200000"),
        ({"quota": 50000}, None, "50000 100000"),
        ({"quota": -1}, "10000 20000\n", "max 20000"),
        ({"period": 50000}, "25000 100000\n", "25000 50000"),
        ({"period": 50000}, None, "max 50000"),
    ],
)
def test_setting_only_quota_or_period_keeps_the_other_in_cpu_max(
    cpu: dict[str, int], before: str | None, expected: str
) -> None:
    assert written({"cpu": cpu}, {"cpu.max": before} if before else {}) == [("cpu.max", expected)]


def test_idle_comes_before_weight() -> None:
    assert written({"cpu": {"idle": 1, "shares": 1024}}) == [
        ("cpu.idle", "1"),
        ("cpu.weight", "100"),
    ]
    assert written({"cpu": {"idle": 1, "shares": 0}}) == [("cpu.idle", "1")]


@pytest.mark.parametrize(("limit", "expected"), [(-1, "max"), (0, "1"), (5, "5")])
def test_a_pids_limit_of_zero_is_written_as_1(limit: int, expected: str) -> None:
    assert written({"pids": {"limit": limit}}) == [("pids.max", expected)]


def test_an_absent_pids_limit_writes_nothing() -> None:
    assert written({"pids": {}}) == []


@pytest.mark.parametrize(
    ("block_io", "files", "message"),
    [
        ({"weight": 5}, {}, "blockIO.weight: 5 is not between 10 and 1000"),
        ({"weight": 1001}, {}, "blockIO.weight: 1001 is not between 10 and 1000"),
        (
            {"weightDevice": [{"major": 8, "minor": 0, "weight": 1001}]},
            {"io.bfq.weight": ""},
            r"weightDevice\[0\].weight: 1001 is not between 1 and 1000",
        ),
    ],
)
def test_an_io_weight_outside_of_its_range_is_refused_by_its_field(
    block_io: dict[str, Any], files: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidSpec, match=message):
        written({"blockIO": block_io}, files)


def test_io_weights_use_bfq_where_available() -> None:
    resources = {
        "blockIO": {
            "weight": 500,
            "throttleReadBpsDevice": [{"major": 8, "minor": 16, "rate": 1024}],
        }
    }
    assert written(resources) == [("io.weight", "4950"), ("io.max", "8:16 rbps=1024")]
    assert written(resources, {"io.bfq.weight": "default 100"})[0] == ("io.bfq.weight", "500")


@pytest.mark.requirement("7.2.8")
def test_huge_pages_limit_use_and_reservation() -> None:
    writes = settings({"hugepageLimits": [{"pageSize": "2MB", "limit": 0}]}, lambda _: None)
    assert writes == [
        CgroupSetting("hugetlb.2MB.max", "0", True),
        CgroupSetting("hugetlb.2MB.rsvd.max", "0", True),
    ]


@pytest.mark.parametrize("size", ["../../memory", "", "2MB/x", "2 MB"])
def test_a_page_size_cannot_name_another_file(size: str) -> None:
    with pytest.raises(InvalidSpec, match="pageSize"):
        written({"hugepageLimits": [{"pageSize": size, "limit": 0}]})


@pytest.mark.requirement("7.2.5")
@pytest.mark.parametrize("key", ["../cgroup.procs", "memory", ".max", "memory.", "a/b.c"])
def test_unified_keys_cannot_leave_the_group(key: str) -> None:
    with pytest.raises(InvalidSpec, match="unified"):
        written({"unified": {key: "1"}})


@pytest.mark.parametrize(
    "key", ["cgroup.procs", "cgroup.threads", "cgroup.kill", "cgroup.freeze", "cgroup.type"]
)
def test_unified_keys_that_move_or_stop_processes_are_refused(key: str) -> None:
    """With `cgroup.procs = "1"`, the machine's init would join the container's cgroup and be killed
    with the container."""
    with pytest.raises(InvalidSpec, match=key):
        written({"unified": {key: "1"}})


def test_unified_may_limit_the_groups_below() -> None:
    assert written({"unified": {"cgroup.max.depth": "2"}}) == [("cgroup.max.depth", "2")]


def test_unified_values_are_written_line_by_line() -> None:
    assert written({"unified": {"io.max": "8:0 rbps=1\n8:16 rbps=2\n"}}) == [
        ("io.max", "8:0 rbps=1"),
        ("io.max", "8:16 rbps=2"),
    ]


@pytest.mark.parametrize(
    "resources",
    [
        {"network": {"classID": 1}},
        {"cpu": {"realtimeRuntime": 5}},
        {"network": {"priorities": [{}]}},
    ],
)
def test_limits_of_v1_only_are_refused(resources: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="cgroup v1"):
        written(resources)


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"hugepageLimits": [{"pageSize": "2MB"}]}, "hugepageLimits[0].limit"),
        (
            {"blockIO": {"weightDevice": [{"major": 8, "weight": 10}]}},
            "blockIO.weightDevice[0].minor",
        ),
        (
            {"blockIO": {"throttleReadBpsDevice": [{"major": 8, "minor": 0}]}},
            "blockIO.throttleReadBpsDevice[0].rate",
        ),
        (
            {"blockIO": {"throttleWriteIOPSDevice": [{"minor": 0, "rate": 1}]}},
            "blockIO.throttleWriteIOPSDevice[0].major",
        ),
    ],
)
def test_an_entry_without_a_number_is_refused(resources: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        written(resources)
    assert refusal.value.message == f"linux.resources.{field}: is required"


def test_harmless_leftovers_of_v1_are_warned_of() -> None:
    assert warnings({"memory": {"swappiness": 60, "kernel": 5, "limit": 1}}) == [
        "memory.kernel has no effect on cgroup v2",
        "memory.swappiness has no effect on cgroup v2",
    ]


def test_a_limit_below_the_usage_is_rejected_on_request() -> None:
    with pytest.raises(InvalidSpec, match="rejecting memory limit"):
        written({"memory": {"limit": 10, "checkBeforeUpdate": True}}, {"memory.current": "11\n"})


def test_null_resources_are_ignored() -> None:
    assert (
        written(
            {"memory": None, "cpu": None, "pids": None, "unified": None, "hugepageLimits": None}
        )
        == []
    )
