"""Tests the command line itself: help, unknown options, options of peers, and verbs on several
containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.harness import Runtime

VERBS = [
    "create",
    "start",
    "run",
    "state",
    "kill",
    "delete",
    "exec",
    "pause",
    "resume",
    "update",
    "ps",
    "events",
    "list",
    "spec",
    "features",
    "checkpoint",
    "restore",
]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_exit_code_0(runtime: Runtime, verb: str) -> None:
    assert verb in runtime(verb, "--help").ok().out
    assert verb in runtime("help", verb).ok().out


def test_help_names_every_verb(runtime: Runtime) -> None:
    for words in (["--help"], ["help"], []):
        output = runtime(*words).ok().out
        assert all(verb in output for verb in VERBS)


@pytest.mark.parametrize(
    "words", [["nonsense"], ["start"], ["start", "a", "b"], ["delete"], ["ps"], ["list", "x"]]
)
def test_unknown_options_and_arguments_are_errors(runtime: Runtime, words: list[str]) -> None:
    if words[0] in ("nonsense", "list") and not runtime.is_pyrunc:
        pytest.skip("runc passes over these")
    assert runtime(*words).code != 0


@pytest.mark.parametrize("options", [["--log-format", "xml"], ["--rootless", "maybe"]])
def test_wrong_values_of_global_options_are_errors(runtime: Runtime, options: list[str]) -> None:
    runtime("list", options=options).fails()


def test_single_dashes_and_equals_signs_are_accepted(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    runtime("create", f"-bundle={box.folder}", "-no-new-keyring=false", box.id).ok()
    assert box.status == "created"
    runtime("delete", "-force=true", box.id).ok()


def test_an_option_without_effect_warns(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc dropped the option")
    runtime.root.mkdir()
    assert "--criu has no effect" in runtime("list", options=["--criu", "criu"]).ok().err


def test_a_regular_expression_selects_several_containers(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("an option of crun's")
    boxes = [runtime.box("sleep", "60").up() for _ in range(2)]
    common = f"^sys-.*-({'|'.join(box.id.rpartition('-')[2] for box in boxes)})$"
    runtime("kill", "--regex", common, "0").ok()
    runtime("kill", "--regex", "(", "0").fails("regex")
    runtime("kill", "--regex", common, "KILL").ok()
    for box in boxes:
        box.gone()
    runtime("delete", "--regex", common).ok()
    assert runtime("list", "-q").ok().out == ""


@pytest.mark.parametrize(
    "words",
    [["state"], ["exec"], ["exec", "--nonsense", "x"], ["create", "--preserve-fds", "x", "y"]],
)
def test_usage_errors_are_logged(runtime: Runtime, tmp_path: Path, words: list[str]) -> None:
    log = tmp_path / "log"
    runtime(*words, options=["--log", str(log), "--log-format", "json"]).fails()
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert entry["level"] == "error" and entry["msg"]


def test_an_empty_signal_and_an_empty_log_format_mean_the_defaults(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    box.create().ok()
    box.kill("nosuch").fails("unknown signal")
    box.kill("").ok()
    box.gone()
    runtime("list", options=["--log-format", ""]).ok()


def test_state_has_a_field_per_line(runtime: Runtime) -> None:
    """`state` prints each field on its own line, because scripts search for the fields."""
    box = runtime.box(
        "sleep", "60", change=lambda config: config.update(annotations={"a": "b"})
    ).up()
    text = runtime("state", box.id).ok().out
    assert '\n  "status": "running",\n' in text and f'\n  "pid": {box.pid},\n' in text
    assert '"annotations": {\n    "a": "b"\n  }' in text


def test_negative_limits_are_invalid(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60").up()
    for option in ("--cpu-period", "--cpu-share", "--cpu-burst"):
        runtime("update", option, "-1", box.id).fails(
            f"{option}: -1 is not between" if runtime.is_pyrunc else "invalid value for"
        )


def test_a_relative_destination_is_a_warning(runtime: Runtime) -> None:
    mount = {"destination": "tmp", "type": "tmpfs", "source": "tmpfs"}
    result = runtime.shell(
        "grep -c ' /tmp ' /proc/mounts", change=lambda config: config["mounts"].append(mount)
    )
    assert result.out == "1\n"
    assert "mount destination tmp is not absolute" in result.err and "level=warning" in result.err


def test_a_missing_hook_is_an_error(runtime: Runtime) -> None:
    hooks = {"createRuntime": [{"path": "/no/such/hook"}]}
    result = runtime.run("true", change=lambda config: config.update(hooks=hooks))
    result.fails("error running createRuntime hook #0").fails("no such file or directory")
