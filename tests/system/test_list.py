"""Tests `list` and `ps`: containers and their processes, as tables and as JSON."""

from __future__ import annotations

from tests.system.harness import Runtime, eventually


def test_list_shows_containers_and_their_status(runtime: Runtime) -> None:
    first, second = runtime.box("sleep", "60").up(), runtime.box("true")
    second.up().gone()
    rows = {row["id"]: row["status"] for row in runtime("list", "--format", "json").ok().json}
    assert rows == {first.id: "running", second.id: "stopped"}
    assert runtime("list", "-q").ok().out.split() == sorted([first.id, second.id])
    header, *lines = runtime("list").ok().out.splitlines()
    assert (
        header.split() == ["ID", "PID", "STATUS", "BUNDLE", "CREATED", "OWNER"] and len(lines) == 2
    )


def test_an_empty_list_is_null_in_json(runtime: Runtime) -> None:
    runtime.root.mkdir()
    assert runtime("list", "--format", "json").ok().json is None


def test_ps_lists_processes(runtime: Runtime) -> None:
    box = runtime.box("sh", "-c", "sleep 61 & sleep 62; true").up()
    eventually(lambda: len(runtime("ps", "--format", "json", box.id).ok().json) == 3)
    pids = runtime("ps", "-f", "json", box.id).ok().json
    assert box.pid in pids
    table = runtime("ps", box.id).ok().out
    assert "PID" in table.splitlines()[0] and "sleep 61" in table and "sleep 62" in table
    runtime("ps", box.id, "-e", "-o", "pid,args").ok()
