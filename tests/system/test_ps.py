"""Tests the processes of a container, by ps(1) of the host."""

from __future__ import annotations

from tests.system.harness import Box, Runtime


def stopped(runtime: Runtime) -> Box:
    box = runtime.box("true").up()
    box.gone()
    return box


def test_ps_lists_the_processes_of_a_running_container(runtime: Runtime) -> None:
    box = runtime.box("sleep", "1000").up()
    header, line = runtime("ps", box.id).ok().out.splitlines()
    assert "PID" in header.split() and "sleep 1000" in line
    assert runtime("ps", "--format", "json", box.id).ok().json == [box.pid]
    assert runtime("ps", box.id, "-o", "pid,args").ok().out.split()[2:] == [
        str(box.pid),
        "sleep",
        "1000",
    ]


def test_ps_lists_no_process_of_a_stopped_container(runtime: Runtime) -> None:
    box = stopped(runtime)
    (header,) = runtime("ps", box.id).ok().out.splitlines()
    assert "PID" in header.split()
    assert runtime("ps", "--format", "json", box.id).ok().json is None


def test_ps_refuses_wrong_arguments(runtime: Runtime) -> None:
    box = stopped(runtime)
    runtime("ps", box.id, "-o", "comm").fails("couldn't find PID field in ps output")
    runtime("ps", box.id, "--nonsense").fails("exit status 1: error: unknown gnu long option")
    runtime("ps", "nobody").fails("container does not exist")
