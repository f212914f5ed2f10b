"""Tests that a flood of records of one kind is dropped and counted, while other kinds pass."""

from __future__ import annotations

import logging

from cri_server.observability.logs.fields import fields_of
from cri_server.observability.logs.rate_limit import BURST_S, KINDS_LIMIT, RateLimit


def record(message: str, *arguments: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("x", level, "", 0, message, arguments, None)


def test_a_flood_of_records_is_limited() -> None:
    now = [0.0]
    limit = RateLimit(5.0, lambda: now[0])
    passed = [limit.filter(record("%s failed", name)) for name in map(str, range(100))]
    assert sum(passed) == 5 * BURST_S and all(passed[: int(5 * BURST_S)])
    assert limit.filter(record("another")) and limit.filter(
        record("%s failed", level=logging.WARNING)
    )
    now[0] += 1.0
    first, second = record("%s failed"), record("%s failed")
    assert limit.filter(first) and fields_of(first) == {"suppressed": 80}
    assert limit.filter(second) and not fields_of(second)
    assert [limit.filter(record("%s failed")) for _ in range(4)] == [True, True, True, False]


def test_a_rate_below_1_per_second_is_possible() -> None:
    now = [0.0]
    limit = RateLimit(0.1, lambda: now[0])
    assert [limit.filter(record("a")) for _ in range(2)] == [True, False]
    now[0] += 11.0
    assert limit.filter(record("a"))


def test_critical_records_and_new_kinds_are_not_limited() -> None:
    limit = RateLimit(1.0, lambda: 0.0)
    assert all(limit.filter(record("a", level=logging.CRITICAL)) for _ in range(50))
    assert all(limit.filter(record(f"kind {i}")) for i in range(3 * KINDS_LIMIT))
    assert len(limit._buckets) <= KINDS_LIMIT
