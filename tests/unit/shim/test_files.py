"""Tests the files between a server and its shims: what one version writes, the versions before and
after it read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyrunc.atomic_file import DamagedRecord
from pyrunc.compile.image_mount import MountedImage
from pyrunc.compile.requests import CgroupChoice, Overlay, PauseRequest
from pyrunc.shim.files import LaunchFile, OtherRuntime, PreparedMount, RestoreFolders

IMAGE = MountedImage("/i/index", ["/i/tar"], "/i/empty")
ROOTFS = Overlay(["/top", "/bottom"], "/c/upper", "/c/work", volatile=True)
LAUNCH = LaunchFile(
    ROOTFS, CgroupChoice("systemd", "warn"), "pod", log_path="/l/0.log", log_directory="/l"
)
# As it was written before the files were records.
EARLIER = {
    "version": 1,
    "sandbox": "pod",
    "rootfs": {
        "lower": ["/top", "/bottom"],
        "upper": "/c/upper",
        "work": "/c/work",
        "volatile": True,
    },
    "tty": False,
    "stdin": False,
    "stdin_once": False,
    "log_path": "/l/0.log",
    "log_directory": "/l",
    "image_volumes": {},
    "settled": [],
    "cgroup": {"driver": "systemd", "missing_controllers": "warn"},
}
PAUSE = {
    "version": 1,
    "hostname": "h",
    "namespaces": {"network": "pinned", "ipc": "new", "uts": "new", "pid": "none", "user": "new"},
    "uid_mappings": [{"containerID": 0, "hostID": 65536, "size": 65536}],
    "gid_mappings": [{"containerID": 0, "hostID": 65536, "size": 65536}],
    "sysctls": {"net.ipv4.ip_forward": "1"},
    "cgroups_path": "/kubepods/pod",
    "cgroup": {"driver": "cgroupfs", "missing_controllers": "error"},
    "oom_score_adj": -998,
    "seccomp": None,
    "shm_size_bytes": 67108864,
    "shm_owner": [65536, 65536],
}


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def test_a_written_launch_file_is_read_unchanged(tmp_path: Path) -> None:
    for written in (
        LAUNCH,
        LAUNCH.replace(
            rootfs=Overlay([], "/c/upper", "/c/work", False, IMAGE), image_volumes={"v": IMAGE}
        ),
        LAUNCH.replace(layer_volumes={"v": Overlay(["/top", "/bottom"])}),
        LAUNCH.replace(
            runtime=OtherRuntime("/bin/runc", ["--debug"]),
            places=[
                PreparedMount("mounts/1", pinned="shm"),
                PreparedMount("mounts/2", lower=["/l"]),
                PreparedMount("mounts/3", image=IMAGE),
            ],
        ),
        LAUNCH.replace(restore=RestoreFolders("/r/images", "/r", {"tcp_close": True})),
    ):
        written.write(tmp_path)
        assert LaunchFile.read(tmp_path).to_fields() == json.loads(json.dumps(written.to_fields()))


def test_a_launch_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    write(tmp_path / "launch.json", EARLIER)
    assert LaunchFile.read(tmp_path) == LAUNCH.replace(image_volumes={}, settled=[])
    places = [{"place": "mounts/1", "pinned": "shm"}, {"place": "mounts/2", "lower": ["/l"]}]
    image = {"index": "/i/index", "devices": ["/i/tar"], "place": "/i/empty"}
    runtime = {"binary": "/bin/runc", "arguments": []}
    more = {"rootfs": {"image": image}, "runtime": runtime, "places": places}
    write(tmp_path / "launch.json", EARLIER | more)
    launch = LaunchFile.read(tmp_path)
    assert launch.rootfs == Overlay(image=IMAGE)
    assert launch.other_runtime == OtherRuntime("/bin/runc", [], systemd=True)
    assert list(launch.places) == [
        PreparedMount("mounts/1", pinned="shm"),
        PreparedMount("mounts/2", lower=["/l"]),
    ]


def test_the_version_before_reads_a_launch_file() -> None:
    """Unset keys are left out, because the earlier version takes every key in the file for a set
    one."""
    fields = LAUNCH.replace(places=[PreparedMount("mounts/1", lower=["/l"])]).to_fields()
    assert not {"runtime", "restore"} & set(fields) and "image" not in fields["rootfs"]
    assert not {"pinned", "image"} & set(fields["places"][0])


def test_the_previous_version_and_this_one_read_each_others_pause_file(tmp_path: Path) -> None:
    write(tmp_path / "holder.json", PAUSE)
    request = PauseRequest.read(tmp_path)
    assert request.cgroup == CgroupChoice() and request.shm_owner == [65536, 65536]
    assert request.seccomp is None and request.program_label == ""
    request.write(tmp_path)
    again = json.loads((tmp_path / "pause.json").read_text())
    labels = {"selinux_label", "mount_label", "program_label"}
    assert {name: again[name] for name in again if name not in labels} == {
        name: value for name, value in PAUSE.items() if value is not None
    }


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        (LaunchFile, {**EARLIER, "rootfs": 1}, "launch.json: rootfs is 1, not"),
        (
            LaunchFile,
            {k: v for k, v in EARLIER.items() if k != "cgroup"},
            "launch.json: cgroup is missing",
        ),
        (LaunchFile, {**EARLIER, "places": [{}]}, r"launch.json: places\[0\].place is missing"),
        (
            PauseRequest,
            {k: v for k, v in PAUSE.items() if k != "namespaces"},
            "pause.json: namespaces is missing",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_the_field(
    tmp_path: Path, kind: type[LaunchFile | PauseRequest], content: dict[str, Any], problem: str
) -> None:
    write(tmp_path / kind.name, content)
    with pytest.raises(DamagedRecord, match=problem):
        kind.read(tmp_path)


def test_unknown_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "launch.json", EARLIER | {"colour": "green"})
    assert LaunchFile.read(tmp_path).sandbox == "pod"
