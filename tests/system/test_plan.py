"""Tests our own verbs: the plan of a bundle, and the time of each of its operations."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.system.console import receive_terminal
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


def test_the_trace_has_both_sides_in_the_order_of_the_plan(
    runtime: Runtime, tmp_path: Path
) -> None:
    """The trace shows the operations of parent and child in the order of the printed plan, also of
    hooks, a user namespace, limits, a seccomp listener and a console."""
    agent = socket.socket(socket.AF_UNIX)
    agent.bind(str(tmp_path / "agent"))
    agent.listen(4)

    def change(config: dict[str, Any]) -> None:
        hook = {"path": "/bin/true"}
        config["hooks"] = {
            kind: [hook, hook] for kind in ("prestart", "createRuntime", "createContainer")
        }
        config["hooks"]["startContainer"] = [hook]
        identical = [{"containerID": 0, "hostID": 0, "size": 1 << 16}]
        config["linux"]["namespaces"].append({"type": "user"})
        config["linux"] |= {"uidMappings": identical, "gidMappings": identical}
        config["linux"]["seccomp"] = {
            "defaultAction": "SCMP_ACT_ALLOW",
            "listenerPath": str(tmp_path / "agent"),
            "syscalls": [{"names": ["swapon"], "action": "SCMP_ACT_NOTIFY"}],
        }
        config["process"]["rlimits"] = [{"type": "RLIMIT_CORE", "soft": 1, "hard": 2}]
        config["process"] |= {"terminal": True, "noNewPrivileges": False}

    box = runtime.box("true", change=change)
    with receive_terminal(tmp_path / "console") as console:
        box.create("--trace", str(tmp_path / "trace"), "--console-socket", str(console.path)).ok()
    agent.close()
    planned = {
        row["line"]: row["operation"]
        for row in runtime("plan", "--json", str(box.folder)).ok().json["operations"]
    }
    rows = [line.split(maxsplit=3) for line in (tmp_path / "trace").read_text().splitlines()[1:]]
    recorded = [number for _, _, number, _ in rows]
    assert recorded == [number for number in planned if number in recorded]
    for _, _, number, text in rows:
        assert text.removeprefix("parent: ").replace(box.id, "ID") == planned[number]
    steps = [planned[number].split()[0:2] for number in recorded if "." in number]
    assert steps == [
        ["write", "id"], ["record", "pid"], ["write", "the"], ["run", "prestart"], ["run",
        "createRuntime"],
        ["run", "createContainer"], ["prlimit", "RLIMIT_CORE"], ["send", "the"],
    ]  # fmt: skip
    assert [number for number in planned if "." in number] == [n for n in recorded if "." in n]
    missing = [number for number in planned if number not in recorded]
    after = list(planned)[list(planned).index(recorded[-1]) + 1 :]
    assert missing == [
        n for n in planned if n in missing and (n in after or "seccomp" in planned[n])
    ]


@pytest.mark.parametrize("start", [False, True])
def test_a_trace_has_the_duration_of_each_operation(
    runtime: Runtime, tmp_path: Path, start: bool
) -> None:
    box = runtime.box("true")
    path = tmp_path / "trace"
    if start:
        runtime("run", "--trace", str(path), "--bundle", str(box.folder), box.id).ok()
    else:
        box.create("--trace", str(path)).ok()
    header, *rows = path.read_text().splitlines()
    assert header.split() == ["us", "since", "start", "line", "operation"]
    times = [int(row.split()[1]) for row in rows]
    assert times == sorted(times) and sum(int(row.split()[0]) for row in rows) <= times[-1] + len(
        rows
    )
    plan = runtime("plan", str(box.folder)).ok().out
    for text in ("mount 'proc' on '/proc'", "pivot_root", "no_new_privs"):
        assert any(row.endswith(text) for row in rows) and text in plan


def test_a_trace_is_right_in_a_time_namespace(runtime: Runtime, tmp_path: Path) -> None:
    """The times of a trace are right although the kernel shifts the process's monotonic clocks by
    `timeOffsets.monotonic`."""

    def change(config: dict[str, Any]) -> None:
        config["linux"]["namespaces"].append({"type": "time"})
        config["linux"]["timeOffsets"] = {"monotonic": {"secs": 1000}}

    box = runtime.box("true", change=change)
    box.create("--trace", str(tmp_path / "trace")).ok()
    _, *rows = (tmp_path / "trace").read_text().splitlines()
    times_us = [int(row.split()[1]) for row in rows]
    assert times_us == sorted(times_us) and times_us[-1] < 100_000_000


def test_a_trace_ends_where_the_create_failed(runtime: Runtime, tmp_path: Path) -> None:
    box = runtime.box(
        "true",
        change=lambda c: c["mounts"].append({"destination": "/x", "type": "nofs", "source": "x"}),
    )
    box.create("--trace", str(tmp_path / "trace")).fails("nofs")
    rows = (tmp_path / "trace").read_text().splitlines()
    assert rows[-1].endswith("mount 'cgroup2' on '/sys/fs/cgroup' (ro,nosuid,nodev,noexec)")


def test_plan_diff_prints_the_difference_of_two_plans(runtime: Runtime) -> None:
    one = runtime.box("true")

    def change(config: dict[str, Any]) -> None:
        config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/proc"]
        config["process"]["rlimits"] = [{"type": "RLIMIT_CORE", "soft": 1, "hard": 2}]

    other = runtime.box("true", change=change)
    same = runtime("plan", "--diff", str(one.folder), str(one.folder)).ok()
    assert same.out == ""
    done = runtime("plan", "--diff", str(one.folder), str(other.folder))
    changes = [line for line in done.out.splitlines()[2:] if line[0] in "+-"]
    assert done.code == 1 and any(c.startswith("-mount 'proc' on '/proc'") for c in changes)
    assert any(c.startswith("+") and "core" in c.lower() for c in changes), changes
    rows = runtime("plan", "--diff", "--json", str(one.folder), str(other.folder)).json["changes"]
    assert [row["change"] + row["operation"] for row in rows] == changes
    for words in (["--diff", str(one.folder)], [str(one.folder), str(other.folder)]):
        runtime("plan", *words).fails("bundle")


def test_why_names_the_lines_of_the_configuration(runtime: Runtime) -> None:
    def change(config: dict[str, Any]) -> None:
        config["hostname"] = "named"
        config["process"]["oomScoreAdj"] = 123
        config["process"]["cwd"] = "/"

    box = runtime.box("true", change=change)
    text = (box.folder / "config.json").read_text().splitlines()
    rows = runtime("why", "--json", str(box.folder)).ok().json["operations"]
    planned = runtime("plan", "--json", str(box.folder)).ok().json["operations"]
    assert [row["operation"] for row in rows] == [row["operation"] for row in planned]
    causes = {row["operation"]: row["causes"] for row in rows}

    def cause(beginning: str) -> list[dict[str, Any]]:
        return next(
            origin for operation, origin in causes.items() if operation.startswith(beginning)
        )

    (hostname,) = cause("sethostname")
    assert hostname["path"] == "hostname" and '"hostname"' in text[hostname["line"] - 1]
    (score,) = cause("set oom_score_adj")
    assert score["path"] == "process.oomScoreAdj"
    assert any(c["path"].startswith("mounts[") for c in cause("mount 'proc' on '/proc'"))
    assert "linux.namespaces" in [c["path"] for c in cause("clone process")]
    assert "process.args" in [c["path"] for c in cause("exec 'true'")]
    assert "process.user" in [c["path"] for c in cause("setuid")]
    assert "hostname (line" in runtime("why", str(box.folder)).ok().out
