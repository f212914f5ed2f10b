"""Tests figures of cgroups as metrics: the required names, and how each value is computed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.observability.metrics import (
    BASE_LABELS,
    CONTAINER,
    ContainerFigures,
    Values,
    descriptors,
)
from cri_server.observability.stats import NO_MEMORY, RATE_WINDOW_NS, SAMPLE_DISTANCE_NS, CpuRates
from pyrunc.cgroups.stats import Stats
from tests.support.metric_names import NAMES

SECOND = 1_000_000_000


def figures(**changes: object) -> ContainerFigures:
    values: dict[str, object] = {
        "usage": Stats(),
        "memory": NO_MEMORY,
        "processes": 1,
        "threads": 1,
        "descriptors": 0,
        "sockets": 0,
        "layer_bytes": 0,
        "disk": os.statvfs(Path("/")),
        "started_at_ns": 0,
        "limits": api.LinuxContainerResources(),
        "open_files_limit": None,
    }
    return ContainerFigures(**{**values, **changes})  # type: ignore[arg-type]


def read(name: str, **changes: object) -> int | Values:
    [metric] = [each for each in CONTAINER if each.name == f"container_{name}"]
    return metric.read(figures(**changes))


@pytest.mark.requirement("10.2.4")
def test_every_required_metric_exists() -> None:
    announced = descriptors()
    # The names are those of requirement 10.2.
    assert sorted(each.name for each in announced) == sorted(NAMES)
    assert len(announced) == 56 and all(each.help and each.label_keys for each in announced)
    keys = {each.name: list(each.label_keys)[len(BASE_LABELS) :] for each in announced}
    assert keys["container_ulimits_soft"] == ["ulimit"] and keys[
        "container_hugetlb_usage_bytes"
    ] == ["pagesize"]


@pytest.mark.requirement("10.2.11")
def test_pressure_is_in_whole_seconds_and_absent_without_counters() -> None:
    usage = Stats(pressure={"cpu": {"some": {"total": 2_999_999}, "full": {"total": 1_000_000}}})
    assert read("pressure_cpu_waiting_seconds_total", usage=usage) == [((), 2)]
    assert read("pressure_cpu_stalled_seconds_total", usage=usage) == [((), 1)]
    assert read("pressure_io_waiting_seconds_total", usage=usage) == []


@pytest.mark.requirement("10.2.11")
def test_huge_pages_have_a_sample_per_size() -> None:
    usage = Stats(
        hugetlb={"2MB": {"current": 4 << 20, "max": None}, "1GB": {"current": 0, "max": 0}}
    )
    assert read("hugetlb_usage_bytes", usage=usage) == [(("2MB",), 4 << 20), (("1GB",), 0)]
    assert read("hugetlb_max_usage_bytes", usage=usage) == [(("2MB",), 0), (("1GB",), 0)]


@pytest.mark.requirement("10.2.11")
def test_limits_are_reported() -> None:
    unlimited = api.LinuxContainerResources(cpu_quota=-1)
    assert read("spec_cpu_quota", limits=unlimited) == 0
    assert read("spec_cpu_quota", limits=api.LinuxContainerResources(cpu_quota=50_000)) == 50_000
    assert (
        read("spec_memory_reservation_limit_bytes", memory=NO_MEMORY.replace(min=1 << 20))
        == 1 << 20
    )
    assert read("ulimits_soft", open_files_limit=1024) == [(("max_open_files",), 1024)]
    assert read("ulimits_soft") == []


@pytest.mark.requirement("10.1.4")
def test_a_rate_needs_two_samples_that_are_far_enough_apart() -> None:
    rates = CpuRates()
    assert rates.of("a", 10 * SECOND, 0) is None
    assert rates.of("a", 10 * SECOND + SAMPLE_DISTANCE_NS - 1, SECOND) is None
    assert rates.of("a", 12 * SECOND, SECOND) == SECOND // 2
    assert rates.of("a", 20 * SECOND, 5 * SECOND) == SECOND // 2
    assert rates.of("a", 22 * SECOND, 6 * SECOND) == SECOND // 2, "since 12 s"
    assert rates.of("a", 32 * SECOND, 26 * SECOND) == 2 * SECOND, "since 22 s"
    assert rates.of("b", 34 * SECOND, 5 * SECOND) is None, "another group"


def test_no_rate_of_a_program_that_works_once_a_second_is_zero() -> None:
    rates = CpuRates()
    rate = None
    # Clients read the metrics at any interval, also twice while the program sleeps.
    for tenth in range(0, 1200, 7):
        now = tenth * SECOND // 10
        rate = rates.of("a", now, now // (2 * SECOND) * (SECOND // 100))
        assert rate is None or rate > 0, now
        assert tenth < 30 or rate is not None, "a rate is known after the first work"
    assert rate is not None and abs(rate - SECOND // 200) < SECOND // 1000


def test_the_rate_of_an_idle_program_is_zero_after_a_full_window() -> None:
    rates = CpuRates()
    for second in range(10):
        assert rates.of("a", second * SECOND, 7) is None
    assert rates.of("a", RATE_WINDOW_NS, 7) == 0
    assert rates.of("a", RATE_WINDOW_NS + SECOND, SECOND) > 0  # type: ignore[operator]


def test_a_rate_keeps_only_the_samples_of_its_window() -> None:
    rates = CpuRates()
    for tenth in range(1000):
        rates.of("a", tenth * SECOND // 10, tenth)
    (samples,) = rates._cache.values()
    assert len(samples) <= RATE_WINDOW_NS // SAMPLE_DISTANCE_NS + 2


def test_a_counter_that_decreases_belongs_to_another_group() -> None:
    rates = CpuRates()
    rates.of("a", 0, 9 * SECOND)
    assert rates.of("a", 2 * SECOND, SECOND) is None
    assert rates.of("a", 4 * SECOND, 3 * SECOND) == SECOND
