"""Tests the log of a command: where it is written, its format, and the messages of --debug."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.system.harness import Runtime

LINE = re.compile(
    r'time="\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ?[^"]*" level=(\w+) msg="((?:[^"\\]|\\.)*)".*'
)


def test_the_log_file_is_made_at_once(runtime: Runtime, tmp_path: Path) -> None:
    runtime.root.mkdir()
    runtime("list", options=["--log", str(tmp_path / "log")]).ok()
    assert (tmp_path / "log").read_text() == ""
    failed = runtime("list", options=["--log", str(tmp_path / "missing" / "log")]).fails(
        "no such file"
    )
    assert str(tmp_path / "missing" / "log") in failed.err


def test_the_log_is_written_with_few_descriptors(runtime: Runtime, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = runtime.command("--log", str(log), "state", "missing")
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *command]
    assert subprocess.run(limited, capture_output=True, check=False).returncode == 1
    assert "missing" in log.read_text()


def test_a_text_log_has_debug_lines(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    for words in (["create", "--bundle", str(box.folder), box.id], ["start", box.id]):
        lines = runtime(*words, options=["--debug"]).ok().err.splitlines()
        if words[0] == "create" or runtime.is_pyrunc:
            assert lines
        for line in lines:
            match = LINE.fullmatch(line)
            assert match and match[1] == "debug", line


@pytest.mark.parametrize("verb", ["run", "exec"])
def test_a_json_log_has_debug_lines(runtime: Runtime, tmp_path: Path, verb: str) -> None:
    log = tmp_path / "log"
    options = ["--debug", "--log", str(log), "--log-format", "json"]
    box = runtime.box("sh", "-c", "exit 3") if verb == "run" else runtime.box("sleep", "60").up()
    words = (
        ["--bundle", str(box.folder), box.id] if verb == "run" else [box.id, "sh", "-c", "exit 3"]
    )
    result = runtime(verb, *words, options=options)
    assert (result.code, result.err) == (3, "")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries and all({"level", "msg", "time"} <= set(entry) for entry in entries)
    assert {entry["level"] for entry in entries} == {"debug"}
    if runtime.is_pyrunc:
        text = "\n".join(entry["msg"] for entry in entries)
        assert re.search(r"process \d+ exists", text) and re.search(r"process \d+ exited: 3", text)


def test_debug_prints_the_steps(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("words of ours")
    hook = {"path": "/bin/busybox", "args": ["true"]}
    box = runtime.box("true", change=lambda config: config.update(hooks={"createRuntime": [hook]}))
    text = runtime("create", "--bundle", str(box.folder), box.id, options=["--debug"]).ok().err
    for words in (
        "config.json",
        f"/{box.id}",
        "plan line 1:",
        "createRuntime hook #0",
        "waits at plan line",
    ):
        assert words in text
    assert runtime("start", box.id).ok().err == ""
    box.gone()
    assert "removed cgroup" in runtime("delete", box.id, options=["--debug"]).ok().err


def test_a_failure_in_debug_is_still_the_last_error_of_the_log(
    runtime: Runtime, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    box = runtime.box("/no/such/program")
    options = ["--debug", "--log", str(log), "--log-format", "json"]
    runtime("create", "--bundle", str(box.folder), box.id, options=options).fails(
        "no such file or directory"
    )
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    (error,) = [entry for entry in entries if entry["level"] == "error"]
    assert "no such file or directory" in error["msg"]
