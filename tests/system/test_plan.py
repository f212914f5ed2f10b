"""What only a runtime with a plan can tell: the plan of a bundle, and how long each of its operations took. Our own verbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.harness import Runtime


@pytest.fixture(autouse=True)
def ours(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("a verb of ours")


def test_a_plan_is_printed_and_nothing_happens(runtime: Runtime) -> None:
    box = runtime.box("true")
    lines = runtime("plan", str(box.folder)).ok().out.splitlines()
    assert any("mount 'proc' on '/proc'" in line for line in lines) and "exec 'true'" in lines[-1]
    operations = runtime("plan", "--json", str(box.folder)).ok().json["operations"]
    assert len(operations) == len(lines)
    assert not runtime.root.exists()


@pytest.mark.parametrize("start", [False, True])
def test_a_trace_has_the_duration_of_each_operation(runtime: Runtime, tmp_path: Path, start: bool) -> None:
    box = runtime.box("true")
    path = tmp_path / "trace"
    if start:
        runtime("run", "--trace", str(path), "--bundle", str(box.folder), box.id).ok()
    else:
        box.create("--trace", str(path)).ok()
    header, *rows = path.read_text().splitlines()
    assert header.split() == ["us", "since", "start", "line", "operation"]
    times = [int(row.split()[1]) for row in rows]
    assert times == sorted(times) and sum(int(row.split()[0]) for row in rows) <= times[-1] + len(rows)
    plan = runtime("plan", str(box.folder)).ok().out
    for text in ("mount 'proc' on '/proc'", "pivot_root", "no_new_privs"):
        assert any(row.endswith(text) for row in rows) and text in plan


def test_a_trace_ends_where_the_create_failed(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box(
        "true", change=lambda c: c["mounts"].append({"destination": "/x", "type": "nofs", "source": "x"})
    )
    box.create("--trace", str(tmp_path / "trace")).fails("nofs")
    rows = (tmp_path / "trace").read_text().splitlines()
    assert rows[-1].endswith("mount 'cgroup2' on '/sys/fs/cgroup' (ro,nosuid,nodev,noexec)")
