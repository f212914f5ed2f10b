"""Tests new limits for a running container, by flags and by a file, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Box, Result, Runtime

TREES = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids")


@pytest.fixture
def box(runtime: Runtime) -> Box:
    return runtime.box("sleep", "60").up()


def update(runtime: Runtime, *words: str, **more: Any) -> Result:
    """Run update; where a controller is on cgroup v1, our runtime gets the option to warn instead
    of failing."""
    options = ["--missing-controllers", "warn"] if runtime.is_pyrunc else []
    return runtime("update", *words, options=options, **more)


def limit(box: Box) -> str | None:
    """Return the largest number of processes of the container; None where the runtime's cgroup tree
    has no pids controller."""
    for tree in TREES:
        file = Path(tree) / box.id / "pids.max"
        if file.exists():
            return file.read_text().strip()
    return None


def test_a_flag_changes_its_limit(runtime: Runtime, box: Box) -> None:
    update(runtime, "--pids-limit", "77", box.id).ok()
    assert limit(box) in ("77", None)
    update(runtime, "--pids-limit", "-1", box.id).ok()
    assert limit(box) in ("max", None)


def test_a_pids_limit_of_zero_has_the_meaning_of_the_containers_version(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc before 1.4 ignores the 0")

    def change(config: dict[str, Any]) -> None:
        config["ociVersion"] = "1.0.2-dev"

    box = runtime.box("sleep", "60", change=change).up()
    update(runtime, "--resources", "-", box.id, stdin='{"pids": {"limit": 0}}').ok()
    assert limit(box) in ("max", None)
    stored = json.loads((runtime.root / box.id / "config.json").read_text())
    assert stored["linux"]["resources"]["pids"] == {"limit": -1}


@pytest.mark.parametrize("linux", [{"resources": None}, {"resources": {"pids": None}}])
def test_limits_replace_a_null_in_the_stored_configuration(
    runtime: Runtime, linux: dict[str, Any]
) -> None:
    box = runtime.box("sleep", "60", **linux).up()
    update(runtime, "--pids-limit", "77", box.id).ok()
    if runtime.is_pyrunc:
        stored = json.loads((runtime.root / box.id / "config.json").read_text())
        assert stored["linux"]["resources"] == {"pids": {"limit": 77}}


@pytest.mark.parametrize("where", ["-", "file"])
def test_a_file_overrides_the_flags(runtime: Runtime, box: Box, tmp_path: Path, where: str) -> None:
    absent = {"memory": None} if runtime.is_pyrunc else {}  # null makes runc end by SIGSEGV
    text = json.dumps({"pids": {"limit": 33}, "unknown": {"x": 1}} | absent)
    (tmp_path / "resources").write_text(text)
    name = "-" if where == "-" else str(tmp_path / "resources")
    update(runtime, "--resources", name, "--pids-limit", "5", box.id, stdin=text).ok()
    assert limit(box) in ("33", None)


@pytest.mark.parametrize(
    "words",
    [
        ["--memory", "much"],
        ["--cpu-quota", "1.5"],
        ["--pids-limit", "1k"],
        ["--cpu-share", str(1 << 64)],
        ["--cpu-share", "-1"],
        ["--blkio-weight", "65536"],
        ["--nonsense", "1"],
        ["--memory"],
    ],
)
def test_invalid_values_are_refused(runtime: Runtime, box: Box, words: list[str]) -> None:
    update(runtime, *words, box.id).fails()
    assert limit(box) in ("max", None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pids": 5}', '{"pids": {"limit": "x"}}'])
def test_resources_of_another_type_are_refused(runtime: Runtime, box: Box, text: str) -> None:
    result = update(runtime, "--resources", "-", box.id, stdin=text).fails()
    if runtime.is_pyrunc and "pids" in text:
        assert "linux.resources.pids" in result.err


def test_update_of_a_missing_and_of_an_ended_container_fails(runtime: Runtime) -> None:
    update(runtime, "--pids-limit", "5", "nobody").fails("does not exist")
    box = runtime.box("true").up()
    box.gone()
    update(runtime, "--pids-limit", "5", box.id).fails("not running" if runtime.is_pyrunc else "")


def test_a_missing_controller_is_an_error_or_a_warning_on_request(
    runtime: Runtime, box: Box
) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("cgroup v2 only is our decision")
    if limit(box) is not None:
        pytest.skip("the controller is there")
    runtime("update", "--pids-limit", "5", box.id).fails(
        "the pids controller is not on the cgroup v2 tree"
    )
    assert "pids controller" in update(runtime, "--pids-limit", "5", box.id).ok().err


def test_intel_rdt_is_refused_where_there_is_none(runtime: Runtime, box: Box) -> None:
    update(runtime, "--l3-cache-schema", "L3:0=f", box.id).fails("rdt")
