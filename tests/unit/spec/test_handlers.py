"""Tests runtime handlers in the configuration, and a bundle for an external runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cri_server import config
from cri_server.api import api_pb2 as api
from cri_server.config import handlers
from cri_server.config.changes import after_reload, changes
from cri_server.spec import external_runtime
from cri_server.spec.mounts import MountRequest
from pyrunc.compile.image_mount import MountedImage
from pyrunc.errors import InvalidSpec
from pyrunc.shim.files import PreparedMount

TEXT = """
[containers]
device_ownership = true
pod_annotations = ["a/*"]
[runtimes.runc]
binary = "/usr/sbin/runc"
[runtimes.other]
cgroup_writable = true
pod_annotations = []
"""


def load(folder: Path, text: str) -> config.Config:
    file = folder / "config.toml"
    file.write_text(text)
    return config.load(file, {})


def test_handlers_are_found_with_their_settings(tmp_path: Path) -> None:
    settings = load(tmp_path, TEXT)
    assert handlers.names(settings) == ["", "pyrunc", "runc", "other"]
    assert handlers.find(settings, "kata") is None
    runc = handlers.find(settings, "runc")
    assert runc is not None and runc.binary == "/usr/sbin/runc"
    assert (
        handlers.settings(settings, "runc")
        == settings.containers
        == handlers.settings(settings, "")
    )
    other = handlers.settings(settings, "other")
    assert other.cgroup_writable and other.device_ownership and other.pod_annotations == []
    assert not settings.containers.cgroup_writable


def test_our_own_may_have_settings_under_its_name(tmp_path: Path) -> None:
    settings = load(tmp_path, "[runtimes.pyrunc]\ncgroup_writable = true\n")
    assert (
        handlers.settings(settings, "pyrunc").cgroup_writable
        and not handlers.settings(settings, "").cgroup_writable
    )
    assert handlers.names(settings) == ["", "pyrunc"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[runtimes.Runc]\nbinary = "/x"', "DNS label"),
        ('[runtimes.pyrunc]\nbinary = "/x"', "the built-in runtime"),
        ('[runtimes.x]\nbinary = "runc"', "absolute"),
        ('[runtimes.x]\narguments = ["--debug"]', "needs binary"),
        ('[runtimes.x]\ndefault_capabilities = ["CAP_NOPE"]', "CAP_NOPE"),
        ('[runtimes.x]\nbinari = "/x"', "did you mean binary"),
    ],
)
def test_invalid_handlers_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidSpec, match=problem) as caught:
        load(tmp_path, text)
    assert "config.toml:" in str(caught.value)


def test_a_running_server_takes_handlers(tmp_path: Path) -> None:
    before, after = load(tmp_path, ""), load(tmp_path, TEXT)
    reloads = {change.key: change.reloads for change in changes(before, after)}
    assert reloads["runtimes.runc"] and reloads["runtimes.other"]
    assert "runc" in after_reload(before, after).runtimes


def test_descriptors_become_paths_for_an_external_runtime(tmp_path: Path) -> None:
    shm = {
        "destination": "/dev/shm",
        "type": "bind",
        "source": "pyrunc:shm",
        "options": ["bind", "rprivate"],
    }
    layers = {
        "destination": "/i",
        "type": "bind",
        "source": "pyrunc:image:/i",
        "options": ["bind", "ro"],
    }
    image = {
        "destination": "/j",
        "type": "bind",
        "source": "pyrunc:image:/j",
        "options": ["bind", "ro"],
    }
    proc = {"destination": "/proc", "type": "proc", "source": "proc", "options": []}
    maps = {"uidMappings": [{"containerID": 0, "hostID": 1, "size": 1}]}
    path = {"destination": "/k", "type": "bind", "source": "/s", "options": ["rbind", "ro"], **maps}
    spec: dict[str, Any] = {"ociVersion": "1.2.0", "mounts": [proc, shm, layers, image, path]}
    index = MountedImage("/x", ["/y"], "/z")
    unpacked = MountRequest(api.Mount(), "/i", source="pyrunc:image:/i", layers=["/a:b", "/c"])
    request = MountRequest(api.Mount(), "/j", source="pyrunc:image:/j", image=index)
    of_host = MountRequest(api.Mount(host_path="/link"), "/k", source="/s")
    changed, places = external_runtime.bundle(spec, [unpacked, request, of_host], str(tmp_path))
    assert changed["ociVersion"] == external_runtime.OCI_VERSION
    assert changed["mounts"] == [
        proc,
        {**shm, "source": f"{tmp_path}/mounts/1"},
        {**layers, "source": f"{tmp_path}/mounts/2"},
        {**image, "source": f"{tmp_path}/mounts/3"},
        {**path, "source": f"{tmp_path}/mounts/4"},
    ]  # fmt: skip
    assert places == [
        PreparedMount("mounts/1", pinned="shm"),
        PreparedMount("mounts/2", lower=["/a:b", "/c"]),
        PreparedMount("mounts/3", image=index),
        PreparedMount("mounts/4", source="/s"),
    ]
    assert sorted(p.name for p in (tmp_path / "mounts").iterdir()) == ["1", "2", "3"]
