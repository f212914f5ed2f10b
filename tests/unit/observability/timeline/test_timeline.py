"""Tests the timeline: its bounded files on disk, spans across tasks, and the selection of
entries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from cri_server.observability.timeline.choose import choose
from cri_server.observability.timeline.ring import FOLLOWER_LIMIT, WAITING_LIMIT, Ring
from cri_server.observability.timeline.trace import (
    CURRENT,
    ROOT,
    SPANS_LIMIT,
    Span,
    Trace,
    add_remote_spans,
    span,
)
from pyrunc.errors import ResourceExhausted


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "call": "RunPodSandbox",
        "started_at_ns": number,
        "duration_ms": 1.0,
        "outcome": "OK",
        **more,
    }


async def test_entries_are_read_in_the_order_of_their_start(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "timeline")
    trace = Trace(
        10.0, 5, [Span("b", 10.02, 10.03, True), Span("a", 10.0, 10.0123), Span("runs", 10.1)]
    )
    trace.spans.append(Span("c", 10.021, 10.022, parent=0))
    ring.add(entry(2))
    ring.add(entry(1), trace)
    entries = ring.read()
    assert [e["started_at_ns"] for e in entries] == [1, 2]
    assert entries[0]["spans"] == [
        {"id": 1, "name": "a", "offset_ms": 0.0, "duration_ms": 12.3},
        {"id": 0, "name": "b", "offset_ms": 20.0, "duration_ms": 10.0, "failed": True},
        {"id": 3, "name": "c", "offset_ms": 21.0, "duration_ms": 1.0, "parent": 0},
    ]
    assert entries[0]["ended_at_ns"] > entries[1]["ended_at_ns"] > 10**18
    again = Ring(tmp_path / "timeline")
    again.add(entry(3))
    assert [e["started_at_ns"] for e in again.read()] == [1, 2, 3]
    assert (tmp_path / "timeline").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "timeline/calls").stat().st_mode & 0o777 == 0o600


async def test_the_files_are_bounded_and_the_newest_entries_stay(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "timeline", limit_bytes=10_000)
    for number in range(2000):
        ring.add(entry(number))
        if number % 10 == 0:
            ring.flush()
    times = [e["started_at_ns"] for e in ring.read()]
    assert times == list(range(times[0], 2000)) and 100 < len(times) < 400
    assert sum(f.stat().st_size for f in (tmp_path / "timeline").iterdir()) < 25_000


async def test_entries_are_written_after_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cri_server.observability.timeline.ring.INTERVAL_S", 0.01)
    ring = Ring(tmp_path / "timeline")
    ring.add(entry(1))
    async with asyncio.timeout(30):
        while not (tmp_path / "timeline/calls").exists():
            await asyncio.sleep(0.01)


async def test_damaged_lines_and_a_full_disk_are_tolerated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(tmp_path / "timeline")
    ring.add(entry(1))
    ring.flush()
    with open(tmp_path / "timeline/calls", "ab") as file:
        file.write(b'{"cut": \n[1]\n{"started_at_ns": "x"}\n\xff\xfe\n')
    ring.add(entry(2))
    assert [e["started_at_ns"] for e in ring.read()] == [1, 2]
    broken = Ring(tmp_path / "file" / "timeline")
    (tmp_path / "file").touch()
    broken.add(entry(1))
    with caplog.at_level(logging.WARNING):
        broken.flush()
    assert "cannot be written" in caplog.text
    for number in range(WAITING_LIMIT + 10):
        broken.add(entry(number))
    assert len(broken._waiting) == WAITING_LIMIT


async def test_spans_of_tasks_belong_to_the_call_that_started_the_tasks() -> None:
    async def work(name: str) -> None:
        with span(name):
            await asyncio.sleep(0)

    async def call(name: str) -> list[str]:
        trace = Trace()
        CURRENT.set(trace)
        await asyncio.gather(work(f"{name}1"), asyncio.create_task(work(f"{name}2")))
        with pytest.raises(ValueError), span(f"{name}3"):
            raise ValueError
        assert [s.failed for s in trace.spans] == [False, False, True]
        return sorted(s.name for s in trace.spans)

    spans = await asyncio.gather(asyncio.create_task(call("a")), asyncio.create_task(call("b")))
    assert spans == [["a1", "a2", "a3"], ["b1", "b2", "b3"]]
    with span("nobody's"):
        add_remote_spans([["nobody's", 0.0, 1.0, -1]])
    trace = Trace()
    CURRENT.set(trace)
    for _ in range(SPANS_LIMIT):
        with span("x"):
            pass
        add_remote_spans([["x", 0.0, 1.0, -1]])
    assert len(trace.spans) == SPANS_LIMIT


async def test_spans_have_parents() -> None:
    trace = Trace()
    CURRENT.set(trace)

    async def inner() -> None:
        with span("inner"):
            add_remote_spans(
                [
                    ["part", 1.0, 2.0, -1],
                    ["wrong"],
                    [1, "x", 3, -1],
                    ["below", 1.0, 1.5, 0],
                    ["lost", 1.0, 1.5, 77],
                ]
            )

    with span("outer"):
        await asyncio.gather(inner(), asyncio.create_task(inner()))
    with span("after"):
        pass
    names = {number: each.name for number, each in enumerate(trace.spans)} | {ROOT: ""}
    parents = [(each.name, names[each.parent]) for each in trace.spans]
    once = [("inner", "outer"), ("part", "inner"), ("below", "part"), ("lost", "inner")]
    assert parents == [("outer", ""), *once, *once, ("after", "")]


async def test_a_follower_gets_stored_and_new_entries(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "timeline")
    ring.add(entry(2))
    first = ring.read()[0]["ended_at_ns"]
    ring.add(entry(1))  # began before, ended after
    async with contextlib.aclosing(ring.follow(first)) as following:
        assert (await anext(following))["started_at_ns"] == 1
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        trace = Trace(10.0, 3, [Span("a", 10.0, 10.001)])
        ring.add(entry(3), trace)
        entries = await waiting
        assert entries["started_at_ns"] == 3 and [s["name"] for s in entries["spans"]] == ["a"]
        for number in range(FOLLOWER_LIMIT + 1):
            ring.add(entry(number))
        with pytest.raises(ResourceExhausted, match="calls behind"):
            async for _ in following:
                pass
    assert not ring._followers


def test_choose_selects_calls_by_pod_and_image() -> None:
    entries = [
        entry(1, pod="default/web", pod_id="aa11", duration_ms=5.0),
        entry(2, pod="other/web", pod_id="bb22", duration_ms=9.0),
        entry(3, pod="default/db", pod_id="cc33", duration_ms=7.0),
        entry(4, image="busybox", duration_ms=1.0),
    ]

    def numbers(**filters: Any) -> list[int]:
        return [e["started_at_ns"] for e in choose(entries, **filters)]

    assert numbers() == [1, 2, 3, 4] and numbers(last=2) == [3, 4]
    assert (
        numbers(pod="web") == [1, 2]
        and numbers(pod="default/web") == [1]
        and numbers(pod="cc3") == [3]
    )
    assert (
        numbers(pod="none") == []
        and numbers(slowest=2) == [2, 3]
        and numbers(pod="web", slowest=1) == [2]
    )
