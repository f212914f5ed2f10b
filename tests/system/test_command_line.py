"""The command line itself: help, words that are none, options of peers, and verbs on several containers."""

from __future__ import annotations

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
def test_help_is_no_error(runtime: Runtime, verb: str) -> None:
    assert verb in runtime(verb, "--help").ok().out
    assert verb in runtime("help", verb).ok().out


def test_help_names_every_verb(runtime: Runtime) -> None:
    for words in (["--help"], ["help"], []):
        found = runtime(*words).ok().out
        assert all(verb in found for verb in VERBS)


@pytest.mark.parametrize(
    "words", [["nonsense"], ["start"], ["start", "a", "b"], ["delete"], ["ps"], ["list", "x"]]
)
def test_wrong_words_are_errors(runtime: Runtime, words: list[str]) -> None:
    if words[0] in ("nonsense", "list") and not runtime.is_pyrunc:
        pytest.skip("runc passes over these")
    assert runtime(*words).code != 0


@pytest.mark.parametrize("options", [["--log-format", "xml"], ["--rootless", "maybe"]])
def test_wrong_values_of_global_options(runtime: Runtime, options: list[str]) -> None:
    runtime("list", options=options).fails()


def test_single_dashes_and_values_after_an_equals_sign(runtime: Runtime) -> None:
    box = runtime.box("sleep", "60")
    runtime("create", f"-bundle={box.folder}", "-no-new-keyring=false", box.id).ok()
    assert box.status == "created"
    runtime("delete", "-force=true", box.id).ok()


def test_an_option_without_effect_warns(runtime: Runtime) -> None:
    if not runtime.is_pyrunc:
        pytest.skip("runc dropped the option")
    runtime.root.mkdir()
    assert "--criu has no effect" in runtime("list", options=["--criu", "criu"]).ok().err


def test_a_regular_expression_names_several(runtime: Runtime) -> None:
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
