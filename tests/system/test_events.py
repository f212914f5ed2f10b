"""Tests `events`: usage and OOM kills, a JSON object per line."""

from __future__ import annotations

import json

import pytest

from tests.system.harness import Runtime


def test_events_prints_the_stats_of_a_running_container(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    event = runtime("events", "--stats", box.id).ok().json
    assert event["type"] == "stats" and event["id"] == box.id
    assert event["data"]["cpu"]["usage"]["total"] > 0
    box.kill("KILL").ok()
    box.gone()
    runtime("events", "--stats", box.id).fails("not running")


def test_events_end_with_the_container(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("waits for cgroup v1 events here")
    box = runtime.box("sleep", "3").up()
    lines = runtime("events", "--interval", "100ms", box.id).ok().out.splitlines()
    assert 1 <= len(lines) <= 60 and all(json.loads(line)["type"] == "stats" for line in lines)


def test_stats_have_every_part_in_types_that_go_programs_read(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    data = runtime("events", "--stats", box.id).ok().json["data"]
    parts = {
        "cpu",
        "cpuset",
        "memory",
        "pids",
        "blkio",
        "hugetlb",
        "intel_rdt",
        "network_interfaces",
    }
    assert parts <= data.keys()
    assert data["pids"]["current"] == 1 and 0 in data["cpuset"]["mems"] and data["cpuset"]["cpus"]
    for part in ("cpu", "memory", "blkio"):
        for kind in data[part].get("psi", {}).values():
            assert isinstance(kind["total"], int)


def test_an_interval_is_a_positive_time(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    for text in ("0s", "-1s", "soon"):
        runtime("events", "--interval", text, "--stats", box.id).fails()
