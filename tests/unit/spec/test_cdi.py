"""Tests CDI: names, files, their precedence, and the edits of a spec."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cri_server.spec import cdi
from pyrunc.errors import InvalidArgument


def write(folder: Path, name: str, kind: str = "vendor.com/gpu", **devices: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    document = {
        "cdiVersion": "0.8.0",
        "kind": kind,
        "containerEdits": {"env": ["COMMON=1"]},
        "devices": [{"name": n, "containerEdits": edits} for n, edits in devices.items()],
        "unknown": True,
    }
    (folder / name).write_text(json.dumps(document))


def spec() -> dict[str, Any]:
    return {
        "process": {"env": ["A=1", "B=2"], "user": {"additionalGids": [5]}},
        "linux": {"resources": {"devices": [{"allow": False}]}},
        "mounts": [],
    }


def test_names_are_collected_once_and_malformed_ones_refused() -> None:
    assert cdi.names(["v.com/c=a"], {"cdi.k8s.io/x": "v.com/c=b, v.com/c=a", "other": "x"}) == [
        "v.com/c=a",
        "v.com/c=b",
    ]
    for wrong in ("", "v.com=a", "v.com/c", "v.com/c=", "../x/c=a", "v.com/c=a\n"):
        with pytest.raises(InvalidArgument):
            cdi.names([wrong], {})


@pytest.mark.requirement("6.17")
def test_edits_are_applied(tmp_path: Path) -> None:
    node = {"path": "/dev/gpu0", "hostPath": "/dev/null", "permissions": "rw"}
    mount = {"hostPath": "/lib/x", "containerPath": "/x"}
    hook = {"hookName": "createContainer", "path": "/bin/hook", "args": ["hook"], "timeout": 5}
    edits = {
        "env": ["A=9"],
        "deviceNodes": [node],
        "mounts": [mount],
        "hooks": [hook],
        "additionalGids": [5, 6],
    }
    write(tmp_path / "etc", "v.json", **{"0": edits, "1": {}})
    document = spec()
    cdi.apply(
        document, cdi.resolve(["vendor.com/gpu=0", "vendor.com/gpu=1"], [str(tmp_path / "etc")])
    )
    assert document["process"]["env"] == ["B=2", "COMMON=1", "A=9"]
    assert document["process"]["user"]["additionalGids"] == [5, 6]
    (device,) = document["linux"]["devices"]
    assert (device["path"], device["type"], device["major"], device["minor"]) == (
        "/dev/gpu0",
        "c",
        1,
        3,
    )
    assert document["linux"]["resources"]["devices"][1] == {
        "allow": True,
        "type": "c",
        "major": 1,
        "minor": 3,
        "access": "rw",
    }
    assert document["mounts"][0]["options"] == ["rbind", "rprivate", "ro"]
    assert document["hooks"]["createContainer"] == [
        {"path": "/bin/hook", "args": ["hook"], "env": [], "timeout": 5}
    ]


def test_a_device_of_a_later_folder_takes_precedence(tmp_path: Path) -> None:
    etc, run = tmp_path / "etc", tmp_path / "run"
    write(etc, "a.json", **{"0": {"env": ["FROM=etc"]}, "twice": {}})
    write(etc, "b.json", twice={})
    write(run, "a.json", **{"0": {"env": ["FROM=run"]}})
    folders = [str(etc), str(run), str(tmp_path / "absent")]
    assert cdi.resolve(["vendor.com/gpu=0"], folders)[1].env == ["FROM=run"]
    for unknown in ("vendor.com/gpu=twice", "vendor.com/gpu=9", "other.com/gpu=0"):
        with pytest.raises(InvalidArgument, match="unresolvable"):
            cdi.resolve([unknown], folders)


def test_untrusted_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, "good.json", good={})
    write(tmp_path, "writable.json", writable={})
    (tmp_path / "writable.json").chmod(0o666)
    write(tmp_path, "foreign.json", foreign={})
    os.chown(tmp_path / "foreign.json", 1000, 1000)
    (tmp_path / "broken.yaml").write_text("{")
    (tmp_path / "wrong.yaml").write_text("kind: 5")
    os.mkfifo(tmp_path / "fifo.json")
    assert len(cdi.resolve(["vendor.com/gpu=good"], [str(tmp_path)])) == 2
    for name in ("writable", "foreign"):
        with pytest.raises(InvalidArgument):
            cdi.resolve([f"vendor.com/gpu={name}"], [str(tmp_path)])


def test_hooks_and_nodes_are_checked() -> None:
    for edits, message in (
        (cdi.CdiEdits(hooks=[cdi.CdiHook(hook_name="never", path="/x")]), "'never'"),
        (cdi.CdiEdits(hooks=[cdi.CdiHook(hook_name="poststop", path="relative")]), "'relative'"),
        (cdi.CdiEdits(device_nodes=[cdi.CdiDeviceNode(path="/etc/passwd")]), "/etc/passwd"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            cdi.apply(spec(), [edits])
