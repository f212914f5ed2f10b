"""Tests that a checkpoint's metadata files are read in the form of pyrunc, containerd and CRI-O,
and that malformed ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.checkpoints import describe, read
from cri_server.containers import restore
from cri_server.spec.mounts import MountRequest
from cri_server.store.model import Container, ResolvedUser
from pyrunc.errors import InvalidArgument

SPEC: dict[str, Any] = {
    "ociVersion": "1.2.0",
    "process": {"terminal": True, "args": ["sh"]},
    "mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/etc/hosts", "type": "bind", "source": "/x", "options": ["rbind", "ro"]},
        {"destination": "/data//", "source": "/y", "options": ["rbind"]},
    ],
}


def folder(tmp_path: Path, config: object, spec: object = SPEC) -> str:
    (tmp_path / "config.dump").write_text(config if isinstance(config, str) else json.dumps(config))
    (tmp_path / "spec.dump").write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return str(tmp_path)


def container() -> Container:
    return Container(
        id="c" * 64,
        sandbox_id="p" * 64,
        config=api.ContainerConfig(metadata=api.ContainerMetadata(name="web")),
        created_at_ns=1_700_000_000_000_000_001,
        boot_id="b",
        image_id="sha256:" + "0" * 64,
        image_ref="registry.test/app@sha256:" + "1" * 64,
        image_name="registry.test/app:1",
        user=ResolvedUser(0, 0, ()),
        stop_signal="SIGTERM",
        log_path="",
        cgroups_path="/p/c",
        resources=api.LinuxContainerResources(),
    )


def test_our_archives_are_read(tmp_path: Path) -> None:
    documents = describe.files(container(), 1_700_000_001_500_000_000, "")
    config = documents["config.dump"]
    assert config["createdTime"] == "2023-11-14T22:13:20.000000001Z"
    assert config["checkpointedTime"] == "2023-11-14T22:13:21.500000000Z"
    checkpoint = read.read(folder(tmp_path, config))
    assert checkpoint.name == "web" and checkpoint.terminal
    assert checkpoint.images == [container().image_ref, container().image_name]
    assert checkpoint.binds == ["/etc/hosts", "/data"]


def test_archives_of_other_runtimes_are_read(tmp_path: Path) -> None:
    # Other runtimes write more fields, null in place of lists, and no image digest.
    config = {
        "id": "x",
        "name": "k8s_c_p",
        "rootfsImage": "",
        "rootfsImageName": "a:1",
        "restored": False,
        "restoredTime": "0001-01-01T00:00:00Z",
    }
    checkpoint = read.read(folder(tmp_path, config, {"mounts": None, "process": {"args": None}}))
    assert checkpoint.images == ["a:1"] and checkpoint.binds == [] and not checkpoint.terminal


@pytest.mark.parametrize(
    ("config", "spec", "why"),
    [
        ("{", SPEC, "config.dump"),
        ("[]", SPEC, "config.dump"),
        ({"rootfsImageRef": 3}, SPEC, "config.dump: .*rootfsImageRef"),
        ({}, "nothing", "spec.dump"),
        ({}, {"mounts": [{"type": "bind"}]}, "spec.dump: .*destination"),
        ({}, {"process": {"terminal": "yes"}}, "spec.dump: .*terminal"),
    ],
)
def test_the_error_names_the_malformed_field(
    tmp_path: Path, config: object, spec: object, why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why):
        read.read(folder(tmp_path, config, spec))


def test_a_missing_or_endless_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has no config\.dump"):
        read.read(str(tmp_path))
    path = folder(tmp_path, {})
    with open(tmp_path / "config.dump", "wb") as file:
        file.truncate(read.DOCUMENT_LIMIT_BYTES + 1)
    with pytest.raises(InvalidArgument, match="is larger than"):
        read.read(path)


@pytest.mark.parametrize("names", [["../x"], ["/a/../../x"], ["/"], [""], ["a\0b"]])
def test_removed_files_with_invalid_paths_are_refused(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "deleted.files").write_text(json.dumps(names))
    with pytest.raises(InvalidArgument, match=r"deleted\.files"):
        read.deleted(str(tmp_path))


def test_the_request_must_match_the_checkpoint() -> None:
    kinds = ("network", "pid", "ipc", "mount")
    checkpoint = read.Checkpoint("c", ["a"], ["/etc/hosts", "/data"], False, frozenset(kinds))
    binds = [{"destination": place, "type": "bind"} for place in ("/etc/hosts", "/data")]
    spec = {"process": {}, "mounts": binds, "linux": namespaces(*kinds)}
    data = MountRequest(api.Mount(container_path="/data"), "/data")
    restore.check(checkpoint, spec, [data])
    with pytest.raises(InvalidArgument, match="had host mounts at /data"):
        restore.check(checkpoint, {**spec, "mounts": binds[:1]}, [])
    with pytest.raises(InvalidArgument, match="had no mount at /more"):
        restore.check(
            checkpoint, spec, [data, MountRequest(api.Mount(container_path="/more"), "/more")]
        )
    with pytest.raises(InvalidArgument, match="had no terminal"):
        restore.check(checkpoint, {**spec, "process": {"terminal": True}}, [data])


@pytest.mark.parametrize("kind", ["network", "pid", "ipc"])
def test_a_restore_needs_the_same_namespaces_of_the_host(tmp_path: Path, kind: str) -> None:
    """Without the check, CRIU would restore a process that used the host's namespace into it,
    although the new pod has its own."""
    kinds = {"network", "pid", "ipc", "mount", "uts"}
    all_own, one_less = namespaces(*kinds), namespaces(*kinds - {kind})
    for before, now, words in (
        (one_less, all_own, f"used the host's {kind} namespace"),
        (all_own, one_less, f"used its pod's {kind} namespace"),
    ):
        checkpoint = read.read(folder(tmp_path, {}, {"linux": before}))
        restore.check(checkpoint, {"process": {}, "mounts": [], "linux": before}, [])
        with pytest.raises(InvalidArgument, match=words):
            restore.check(checkpoint, {"process": {}, "mounts": [], "linux": now}, [])


def namespaces(*kinds: str) -> dict[str, list[dict[str, str]]]:
    return {"namespaces": [{"type": kind} for kind in kinds]}


def test_an_image_with_a_checkpoint_is_recognized_by_its_annotation() -> None:
    assert restore.holds_checkpoint(frozenset({"org.criu.checkpoint.container.name"}))
    assert restore.holds_checkpoint(frozenset({"io.kubernetes.cri-o.annotations.checkpoint.name"}))
    assert not restore.holds_checkpoint(frozenset({"org.opencontainers.image.title"}))
