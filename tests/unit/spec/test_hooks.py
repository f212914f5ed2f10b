"""Tests hooks of oci-hooks(5): the files, their order, and the containers that they apply to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cri_server.spec import hooks
from pyrunc.errors import WrongState


def write(
    folder: Path, name: str, when: dict[str, Any], stages: list[str] | None = None, **more: Any
) -> None:
    folder.mkdir(exist_ok=True)
    content = {
        "version": "1.0.0",
        "hook": {"path": f"/bin/{folder.name}-{name}", "args": [name, "x"], "timeout": 5},
        "when": when,
        "stages": stages or ["prestart"],
        **more,
    }
    (folder / f"{name}.json").write_text(json.dumps(content))


def applied(
    hook_list: list[hooks.ConfiguredHook], *args: str, bind_mounts: bool = False, **annotations: str
) -> dict[str, Any]:
    spec: dict[str, Any] = {"process": {"args": list(args or ["/bin/sh"])}}
    hooks.apply(spec, hook_list, annotations, bind_mounts)
    return {s: [h["path"].rsplit("-", 1)[1] for h in e] for s, e in spec.get("hooks", {}).items()}


def test_files_are_ordered_by_name_and_a_later_folder_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path / "a", "02", {"always": True})
    write(tmp_path / "a", "01-B", {"always": True}, ["poststop", "prestart", "poststop"])
    write(tmp_path / "b", "02", {"always": True})
    (tmp_path / "a" / "README").write_text("no hook")
    hook_list = hooks.read([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "absent")])
    spec: dict[str, Any] = {"process": {"args": []}}
    hooks.apply(spec, hook_list, {}, False)
    first = {"path": "/bin/a-01-B", "args": ["01-B", "x"], "timeout": 5}
    second = {"path": "/bin/b-02", "args": ["02", "x"], "timeout": 5}
    assert spec["hooks"] == {"poststop": [first], "prestart": [first, second]}


def test_all_conditions_must_hold(tmp_path: Path) -> None:
    folder = tmp_path / "h"
    write(folder, "always", {"always": True})
    write(folder, "never", {"always": False})
    write(folder, "none", {})
    write(folder, "command", {"commands": ["/init$", "^/bin/sh$"]})
    write(folder, "binds", {"hasBindMounts": True})
    write(folder, "annotated", {"annotations": {"^io\\.x$": "^y", "b": ""}})
    write(folder, "both", {"commands": ["sh"], "hasBindMounts": True})
    hook_list = hooks.read([str(folder)])
    assert applied(hook_list) == {"prestart": ["always", "command"]}
    assert applied(hook_list, "/sbin/init") == {"prestart": ["always", "command"]}
    assert applied(hook_list, "/x", bind_mounts=True) == {"prestart": ["always", "binds"]}
    assert applied(hook_list, bind_mounts=True) == {
        "prestart": ["always", "binds", "both", "command"]
    }
    assert applied(hook_list, "/x", **{"io.x": "yes", "b": "1"}) == {
        "prestart": ["always", "annotated"]
    }
    assert applied(hook_list, "/x", **{"io.x": "no", "b": "1"}) == {"prestart": ["always"]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "0.1.0"}, "Invalid enum value"),
        ({"stages": ["prestrat"]}, "prestrat"),
        ({"hook": {"path": "relative"}}, "not absolute"),
        ({"when": {"comands": ["x"]}}, "unknown field `comands`"),
        ({"when": {"commands": ["("]}}, "missing )"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    write(tmp_path / "h", "1", {"always": True})
    path = tmp_path / "h" / "1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(WrongState) as caught:
        hooks.read([str(tmp_path / "h")])
    assert str(path) in str(caught.value) and why in str(caught.value)
