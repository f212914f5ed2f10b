"""Tests hooks of create and start: where each kind runs, what it reads, and what its failure
does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyrunc.container.create import create
from pyrunc.container.start import release
from pyrunc.errors import PeerError
from tests.kernel.box import Box, finish


def hook(script: str, **more: Any) -> dict[str, Any]:
    return {
        "path": "/bin/busybox",
        "args": ["sh", "-c", script],
        "env": ["PATH=/bin:/usr/bin", "MARK=1"],
        **more,
    }


@pytest.fixture
def kinds(box: Box, tmp_path: Path) -> Box:
    box.config["root"]["path"] = "image"
    return box


def facts_script(path: Path | str) -> str:
    return f"cat > {path}; readlink /proc/self/ns/mnt >> {path}; pwd >> {path}; env >> {path}"


def test_prestart_and_create_runtime_hooks_run_in_the_hosts_namespaces(
    kinds: Box, tmp_path: Path
) -> None:
    kinds.config["hooks"] = {
        "prestart": [hook(facts_script(tmp_path / "one"))],
        "createRuntime": [hook(f"test -s {tmp_path}/one && " + facts_script(tmp_path / "two"))],
    }
    kinds.config["annotations"] = {"a": "b"}
    kinds.run("true", overlay=False)
    for name in ("one", "two"):
        state, namespace = (tmp_path / name).read_text().split("mnt:", 1)
        hook_state = json.loads(state)
        assert hook_state["status"] == "creating"
        assert hook_state["annotations"] == {"a": "b"}
        assert hook_state["bundle"] == str(tmp_path)
        assert hook_state["pid"] > 1
        assert "mnt:" + namespace.split()[0] == os.readlink("/proc/self/ns/mnt")
        assert "MARK=1" in namespace
        assert "HOME" not in namespace


@pytest.mark.parametrize("overlay", [False, True])
def test_create_container_hooks_run_in_the_containers_mount_namespace(
    kinds: Box, tmp_path: Path, overlay: bool
) -> None:
    """A createContainer hook sees the runtime's files and the container's mounts. Its own mounts in
    the root exist in the container only."""
    kinds.config["hooks"] = {
        "createContainer": [
            hook(facts_script(tmp_path / "seen")),
            hook("mkdir -p home/web/x && mount -t tmpfs t home/web/x && touch home/web/x/made"),
        ]
    }
    assert kinds.run("ls /home/web/x", overlay=overlay) == "made\n"
    assert not (kinds.image / "home/web/x/made").exists()
    state, rest = (tmp_path / "seen").read_text().split("mnt:", 1)
    assert json.loads(state)["pid"] == 1
    lines = rest.splitlines()
    assert "mnt:" + lines[0] != os.readlink("/proc/self/ns/mnt")
    assert lines[1] == str(kinds.image)


def test_start_container_hooks_run_inside_the_container(kinds: Box, tmp_path: Path) -> None:
    (kinds.image / "notes").mkdir(mode=0o777)
    os.chmod(kinds.image / "notes", 0o777)
    kinds.process["user"] = {"uid": 1000, "gid": 1000}
    kinds.config["hooks"] = {
        "startContainer": [
            {
                "path": "/bin/sh",
                "args": [
                    "sh",
                    "-c",
                    "cat > /notes/state; id -u > /notes/id; ls /proc/self/fd > /notes/fds",
                ],
            },
            {
                "path": "/bin/sh",
                "args": ["sh", "-c", "cat > /notes/again; echo $PATH > /notes/path"],
                "timeout": 20,
            },
        ]
    }
    created = create(
        kinds.request("sh", "-c", "sleep 1000", start_immediately=False, state_dir=str(tmp_path))
    )
    notes = kinds.upper / "notes"
    try:
        assert not (notes / "state").exists()
        release(str(tmp_path), ("sh",))
        hook_state = json.loads((notes / "state").read_text())
        assert (hook_state["status"], hook_state["pid"]) == ("created", 1)
        assert (notes / "again").read_text() == (notes / "state").read_text()
        assert (notes / "id").read_text() == "1000\n"
        assert (notes / "fds").read_text().split() == ["0", "1", "2", "3"]  # 3: the listing's own
        assert "/bin" in (notes / "path").read_text()
        assert sorted(os.listdir(f"/proc/{created.pid}/fd")) == ["0", "1", "2"]
    finally:
        os.kill(created.pid, 9)
        finish(created)


@pytest.mark.parametrize("kind", ["prestart", "createRuntime", "createContainer", "startContainer"])
@pytest.mark.parametrize(
    ("script", "more", "words"),
    [
        ("exit 3", {}, "exit status 3"),
        ("kill -9 $$", {}, "signal 9"),
        ("sleep 60", {"timeout": 1}, "did not end|in time"),
    ],
)
def test_a_failing_hook_fails_the_container(
    kinds: Box, kind: str, script: str, more: dict[str, Any], words: str
) -> None:
    path = "/bin/sh" if kind == "startContainer" else "/bin/busybox"
    kinds.config["hooks"] = {
        kind: [hook("true") | {"path": path}, hook(script, **more) | {"path": path}]
    }
    with pytest.raises(PeerError, match=rf"error running {kind} hook #1: .*({words})"):
        kinds.run("true", overlay=False)


def test_a_failing_start_hook_is_reported_by_start(kinds: Box, tmp_path: Path) -> None:
    kinds.config["hooks"] = {"startContainer": [{"path": "/bin/false"}]}
    created = create(kinds.request("true", start_immediately=False, state_dir=str(tmp_path)))
    with pytest.raises(PeerError, match="startContainer hook #0: exit status 1"):
        release(str(tmp_path), ("true",))
    assert finish(created) == 1


@pytest.mark.parametrize("kind", ["prestart", "createRuntime", "createContainer", "startContainer"])
def test_a_hook_may_have_a_very_long_timeout(kinds: Box, tmp_path: Path, kind: str) -> None:
    kinds.config["hooks"] = {kind: [hook("exit 0", timeout=(1 << 63) - 1)]}
    kinds.run("true", overlay=False)


@pytest.mark.parametrize("kind", ["createRuntime", "createContainer"])
def test_a_missing_hook_is_an_error(kinds: Box, kind: str) -> None:
    kinds.config["hooks"] = {kind: [{"path": "/no/such/hook"}]}
    with pytest.raises(PeerError, match=r"#0: execve '/no/such/hook': no such file or directory"):
        kinds.run("true", overlay=False)
