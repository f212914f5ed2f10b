"""Tests the figures of a cgroup in messages to kubelet."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.observability import stats
from pyrunc.cgroups.stats import Memory, Stats

MIB = 1 << 20
MEMORY = Memory(
    50 * MIB,
    stat={"anon": 20 * MIB, "inactive_file": 10 * MIB, "pgfault": 77, "pgmajfault": 5},
    events={},
    max=64 * MIB,
    swap_current=3 * MIB,
    swap_max=8 * MIB,
)


def filled(**parts: Any) -> tuple[api.CpuUsage, api.MemoryUsage]:
    cpu, memory = api.CpuUsage(), api.MemoryUsage()
    stats._fill("key", cpu, memory, Stats(**parts))
    return cpu, memory


@pytest.mark.requirement("10.1.6", "10.1.7", "10.1.8", "10.1.9", "10.1.10")
def test_memory_stats_are_filled() -> None:
    _, memory = filled(memory=MEMORY)
    assert memory.timestamp and memory.usage_bytes.value == 50 * MIB
    assert memory.working_set_bytes.value == 40 * MIB and memory.available_bytes.value == 24 * MIB
    assert (memory.rss_bytes.value, memory.page_faults.value, memory.major_page_faults.value) == (
        20 * MIB,
        77,
        5,
    )


@pytest.mark.requirement("10.1.7", "10.1.8")
def test_memory_without_a_limit_has_no_available_bytes() -> None:
    _, memory = filled(memory=Memory(MIB, {"inactive_file": 2 * MIB}, {}))
    assert memory.working_set_bytes.value == 0 and not memory.HasField("available_bytes")


@pytest.mark.requirement("10.1.11")
def test_swap_stats_are_filled() -> None:
    swap = api.SwapUsage()
    stats._fill_swap(swap, Stats(memory=MEMORY))
    assert (swap.swap_usage_bytes.value, swap.swap_available_bytes.value) == (3 * MIB, 5 * MIB)
    none = api.SwapUsage()
    stats._fill_swap(none, Stats(memory=Memory(1, {}, {})))
    assert not none.timestamp, "a kernel without swap accounting"


@pytest.mark.requirement("10.1.3", "10.1.5")
def test_cpu_stats_have_pressure() -> None:
    figures = {"avg10": 1.5, "avg60": 2.5, "avg300": 3.5, "total": 1234}
    cpu, memory = filled(
        cpu={"usage_usec": 5}, pressure={"cpu": {"some": figures, "full": figures}}
    )
    assert cpu.usage_core_nano_seconds.value == 5000
    assert cpu.psi.Some.Total == 1_234_000, "nanoseconds"
    assert (cpu.psi.Full.Avg10, cpu.psi.Full.Avg60, cpu.psi.Full.Avg300) == (1.5, 2.5, 3.5)
    assert not memory.HasField("psi")


@pytest.mark.requirement("5.5.2")
async def test_sizes_of_layers_are_returned_without_a_walk(tmp_path: Path) -> None:
    """The first request for a layer starts its only measurement, in the background. Later requests
    return the result."""
    layers, upper = stats.LayerSizes(), tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_bytes(b"x" * MIB)
    assert layers.measured({"a": tmp_path}) == (0, 0)
    await asyncio.gather(*(walk for _, walk in layers._walks.values()))
    sizes = layers.measured({"a": tmp_path})
    assert sizes[0] >= MIB and sizes[1] > 0
    (upper / "more").write_bytes(b"x" * MIB)
    assert layers.measured({"a": tmp_path}) == sizes and not layers._walks


async def test_slow_walks_delay_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walks of many large layers leave threads for other work, and continue after their callers
    were answered."""
    # Each stands for a layer with millions of small files.
    slow, go_on, running = {f"slow{n}" for n in range(20)}, threading.Event(), set[Path]()

    def written(root: Path) -> tuple[int, int]:
        if root.name in slow:
            running.add(root)
            go_on.wait()
        return 7, 1

    monkeypatch.setattr(stats, "_written", written)
    layers = stats.LayerSizes()
    try:
        assert set(await layers.of({"quick": tmp_path / "quick"})) == {"quick"}
        roots = {name: tmp_path / name for name in (*slow, "quick")}
        assert set(await layers.of(roots)) == {"quick"}
        assert set(await layers.of(roots)) == {"quick"} and layers.measured(roots) == (7, 1)
        assert len(running) == stats.WALKS and await asyncio.to_thread(bool, running)
    finally:
        go_on.set()
        await asyncio.gather(*(walk for _, walk in layers._walks.values()))
    sizes = await layers.of(roots)
    assert {size.used_bytes for size in sizes.values()} == {7} and sizes.keys() == roots.keys()
