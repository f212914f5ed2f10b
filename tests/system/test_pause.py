"""Tests `pause` and `resume`."""

from __future__ import annotations

import pytest

from tests.system.harness import Runtime


def test_a_container_is_paused_and_resumed(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("freezes on cgroup v1 here")
    box = runtime.box("sleep", "60").up()
    runtime("resume", box.id).fails("not paused")
    runtime("pause", box.id).ok()
    assert box.status == "paused"
    runtime("pause", box.id).fails("not running")
    box.exec("true").fails("cannot exec in a paused container", code=255)
    box.delete().fails("not stopped")
    runtime("resume", box.id).ok()
    assert box.status == "running"


def test_a_paused_container_can_be_killed_and_deleted(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    runtime("pause", box.id).ok()
    box.delete("--force").ok()
    runtime("state", box.id).fails("does not exist")
