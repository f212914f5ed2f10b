"""Figures of cgroups as metrics: the required names, and how each value is computed."""

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
from cri_server.observability.stats import NO_MEMORY, RATE_WINDOW_NS, CpuRates
from tests.support.metric_names import NAMES

SECOND = 1_000_000_000


def figures(**changes: object) -> ContainerFigures:
    values: dict[str, object] = {
        "cpu": {},
        "memory": NO_MEMORY,
        "io": {},
        "pressure": {},
        "hugetlb": {},
        "processes": 1,
        "threads": 1,
        "threads_limit": 0,
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
    [metric] = [each for each in CONTAINER if each.name == name]
    return metric.read(figures(**changes))


@pytest.mark.requirement("10.2.4")
def test_every_required_metric_exists() -> None:
    """Requirement 10.2 lists the metrics."""
    announced = descriptors()
    assert sorted(each.name for each in announced) == sorted(NAMES)
    assert len(announced) == 56 and all(each.help and each.label_keys for each in announced)
    keys = {each.name: list(each.label_keys)[len(BASE_LABELS) :] for each in announced}
    assert keys["container_ulimits_soft"] == ["ulimit"] and keys[
        "container_hugetlb_usage_bytes"
    ] == ["pagesize"]


@pytest.mark.requirement("10.2.11")
def test_pressure_is_in_whole_seconds_and_absent_without_counters() -> None:
    pressure = {"cpu": {"some": {"total": 2_999_999}, "full": {"total": 1_000_000}}}
    assert read("pressure_cpu_waiting_seconds_total", pressure=pressure) == [((), 2)]
    assert read("pressure_cpu_stalled_seconds_total", pressure=pressure) == [((), 1)]
    assert read("pressure_io_waiting_seconds_total", pressure=pressure) == []


@pytest.mark.requirement("10.2.11")
def test_huge_pages_have_a_sample_per_size() -> None:
    hugetlb = {"2MB": {"current": 4 << 20, "max": None}, "1GB": {"current": 0, "max": 0}}
    assert read("hugetlb_usage_bytes", hugetlb=hugetlb) == [(("2MB",), 4 << 20), (("1GB",), 0)]
    assert read("hugetlb_max_usage_bytes", hugetlb=hugetlb) == [(("2MB",), 0), (("1GB",), 0)]


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
    assert rates.of("a", 10 * SECOND + RATE_WINDOW_NS - 1, SECOND) is None
    assert rates.of("a", 12 * SECOND, SECOND) == SECOND // 2
    assert rates.of("a", 12 * SECOND + 1, 5 * SECOND) == SECOND // 2, "too early for another"
    assert rates.of("a", 14 * SECOND, 5 * SECOND) == 2 * SECOND
    assert rates.of("b", 14 * SECOND, 5 * SECOND) is None, "another group"


def test_a_counter_that_decreases_belongs_to_another_group() -> None:
    rates = CpuRates()
    rates.of("a", 0, 9 * SECOND)
    assert rates.of("a", 2 * SECOND, SECOND) is None
    assert rates.of("a", 4 * SECOND, 3 * SECOND) == SECOND
