"""Tests how OCI resources and annotations become properties of a systemd unit."""

from __future__ import annotations

import pytest

from pyrunc.cgroups.scope_properties import (
    INFINITY,
    bitmap,
    from_annotations,
    properties,
    quota_per_second,
)
from pyrunc.errors import InvalidSpec


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("0", b"\x01"),
        ("0-2", b"\x07"),
        ("0-2,8", b"\x07\x01"),
        ("15", b"\x00\x80"),
        ("1, 3", b"\x0a"),
    ],
)
def test_cpu_lists_become_bitmaps(text: str, bits: bytes) -> None:
    assert bitmap(text) == bits


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1-2-3", "99999999", "\u00b2", "9" * 5000])
def test_broken_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(InvalidSpec):
        bitmap(text)


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [
        (50000, 100000, 500000),
        (100000, 100000, 1000000),
        (1, 100000, 10000),
        (12345, 100000, 130000),
        (-1, 100000, INFINITY),
    ],
)
def test_quota_is_rounded_up_to_whole_percents(quota: int, period: int, expected: int) -> None:
    assert quota_per_second(quota, period) == expected


def test_limits_become_properties() -> None:
    by_name = dict(properties({
        "cpu": {"shares": 1024, "quota": 20000, "period": 50000, "cpus": "0"},
        "memory": {"limit": 1 << 20, "swap": 3 << 20, "reservation": 4096},
        "pids": {"limit": -1},
    }))  # fmt: skip
    assert by_name == {
        "CPUWeight": ("t", 100), "CPUQuotaPeriodUSec": ("t", 50000), "CPUQuotaPerSecUSec": ("t",
        400000),
        "AllowedCPUs": ("ay", b"\x01"), "MemorySwapMax": ("t", 2 << 20), "MemoryMax": ("t",
        1 << 20),
        "MemoryLow": ("t", 4096), "TasksMax": ("t", INFINITY),
    }  # fmt: skip


def test_unified_limits_become_properties_and_override_others() -> None:
    by_name = dict(properties({
        "memory": {"limit": 5},
        "unified": {"memory.max": "max", "cpu.max": "max 5000", "memory.oom.group": "1",
        "io.weight": "5"},
    }))  # fmt: skip
    assert by_name["MemoryMax"] == ("t", INFINITY)
    assert by_name["CPUQuotaPerSecUSec"] == ("t", INFINITY)
    assert by_name["OOMPolicy"] == ("s", "kill")
    assert not any("IO" in name for name in by_name)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TimeoutStopUSec", "uint64 5", ("TimeoutStopUSec", ("t", 5))),
        ("TimeoutStopSec", "1.5", ("TimeoutStopUSec", ("t", 1500000))),
        ("CollectMode", "'inactive'", ("CollectMode", ("s", "inactive"))),
        ("After", "['a.service', \"b.service\"]", ("After", ("as", ["a.service", "b.service"]))),
        ("DefaultDependencies", "true", ("DefaultDependencies", ("b", True))),
    ],
)
def test_annotations_set_properties(name: str, text: str, expected: object) -> None:
    assert from_annotations({f"org.systemd.property.{name}": text, "other": "x"}) == [expected]


@pytest.mark.parametrize(
    ("name", "text"), [("Ab", "1"), ("Exec.Start", "1"), ("Good", "<1>"), ("TimeoutSec", "'x'")]
)
def test_other_annotations_are_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidSpec, match="annotations"):
        from_annotations({f"org.systemd.property.{name}": text})
