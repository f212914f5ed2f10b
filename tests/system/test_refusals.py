"""Tests that an impossible configuration is refused with one error of the right text, and leaves
nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import Runtime

Config = dict[str, Any]


def leaves_nothing(runtime: Runtime) -> bool:
    return not runtime.root.exists() or not any(runtime.root.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nosuchprogram"], "executable file not found in $PATH"),
        (["/no/such/program"], "no such file or directory"),
        (["/etc/passwd"], "permission denied"),
        (["/etc"], ""),
    ],
)
def test_a_program_that_cannot_run_is_an_error(
    runtime: Runtime, args: list[str], words: str
) -> None:
    result = runtime.run(*args)
    assert result.code != 0 and words in result.err.lower().replace("$path", "$PATH"), result
    assert leaves_nothing(runtime)


def _set(path: str, value: object) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        target: Any = config
        *parents, last = path.split("/")
        for name in parents:
            target = target.setdefault(name, {})
        target[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("root/path", "/no/such/folder"),
        _set("process/args", []),
        _set("process/cwd", "relative"),
        _set("process/cwd", ""),
        _set("linux/namespaces", [{"type": "pid"}, {"type": "pid"}, {"type": "mount"}]),
        _set("linux/namespaces", [{"type": "mount"}, {"type": "nonsense"}]),
        _set("linux/namespaces", [{"type": "mount"}, {"type": "network", "path": "/no/such/ns"}]),
        _set("process/rlimits", [{"type": "RLIMIT_NONSENSE", "soft": 1, "hard": 1}]),
        _set("linux/sysctl", {"kernel.panic": "1"}),
        _set("linux/rootfsPropagation", "sideways"),
        _set("linux/seccomp", {"defaultAction": "SCMP_ACT_NONSENSE"}),
        _set("hooks", {"createRuntime": [{"path": "relative"}]}),
        _set("ociVersion", "nonsense"),
        _set(
            "mounts",
            [
                {
                    "destination": "/x",
                    "type": "bind",
                    "source": "/no/such/source",
                    "options": ["bind"],
                }
            ],
        ),
    ],
    ids=lambda change: repr(change.__closure__[0].cell_contents),
)
def test_a_broken_configuration_is_refused(
    runtime: Runtime, change: Callable[[Config], None]
) -> None:
    box = runtime.box("true", change=change)
    if (
        not runtime.is_pyrunc
        and box.folder.joinpath("config.json").read_text().find('"ociVersion": "nonsense"') > 0
    ):
        pytest.skip("runc does not read the version")
    result = runtime("run", "--bundle", str(box.folder), box.id).fails()
    assert len(result.err.strip().splitlines()) == 1 or not runtime.is_pyrunc, result
    assert leaves_nothing(runtime)


def test_a_missing_configuration_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    runtime("create", "--bundle", str(empty), "x").fails("config.json not found")


def test_a_configuration_that_is_not_json_is_refused(runtime: Runtime) -> None:
    box = runtime.box("true")
    (box.folder / "config.json").write_text("{")
    box.create().fails()
    assert leaves_nothing(runtime)


def test_the_json_log_has_a_single_object(runtime: Runtime, tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    box = runtime.box("nosuchprogram")
    options = ["--log", str(log), "--log-format", "json"]
    runtime("create", "--bundle", str(box.folder), box.id, options=options).fails(
        "executable file not found"
    )
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["level"] == "error" and "executable file not found in $PATH" in last["msg"]
    if runtime.is_pyrunc:
        json.loads(log.read_text())


def test_missing_values_and_unknown_options_are_errors(runtime: Runtime) -> None:
    assert "flag needs an argument" in (result := runtime("create", "--bundle")).err + result.out
    assert runtime("start").code == 1
    assert runtime("start", "--nonsense", "x").code == 1
    assert runtime("exec", "nobody", "true").code in (1, 255)


def test_unknown_properties_and_annotations_are_ignored(runtime: Runtime) -> None:
    def change(config: Config) -> None:
        config["unknownThing"] = {"a": 1}
        config["process"]["unknownToo"] = [1]
        config["annotations"] = {"unknown": "x"}

    runtime.run("true", change=change).ok()
