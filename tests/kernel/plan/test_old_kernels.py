"""Tests workarounds for kernels before 6.15, forced on this kernel: the results are the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyrunc.compile import host as facts
from pyrunc.compile.requests import CgroupChoice, PauseRequest
from pyrunc.kernel import detached
from pyrunc.kernel import mount as km
from tests.kernel.box import Box, release
from tests.kernel.pause_process import hold
from tests.support import session


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(facts, "_host", facts.host().replace(clones_detached=False))
    yield


def test_shared_memory_lives_in_the_pause_process(box: Box, old: None) -> None:
    shm = km.open_mount("tmpfs", [("mode", "1777")], attributes=2 | 4 | 8)
    pod = hold(
        session.name("opod"),
        PauseRequest({"ipc": "new"}, CgroupChoice(missing_controllers="warn")),
        mounts={"/dev/shm": shm},
    )
    try:
        lines = Path(f"/proc/{pod.pid}/mountinfo").read_text().splitlines()
        assert sorted(line.split()[4] for line in lines) == ["/", "/dev/shm"]
        box.mount_fds["shm"] = shm
        box.config["mounts"] = [m for m in box.config["mounts"] if m["destination"] != "/dev/shm"]
        box.add_mount("/dev/shm", "pyrunc:shm", "rbind", "rw")
        folder = Path.cwd()
        box.run("echo hi > /dev/shm/word", mount_namespace=f"/proc/{pod.pid}/ns/mnt")
        assert box.run("cat /dev/shm/word", mount_namespace=f"/proc/{pod.pid}/ns/mnt") == "hi\n"
        assert Path.cwd() == folder
    finally:
        os.close(shm)
        release(pod)


def test_folders_are_masked_without_cloned_mounts(box: Box, old: None) -> None:
    (box.image / "secret").mkdir()
    (box.image / "secret/key").touch()
    box.linux["maskedPaths"] = ["/secret", "/proc/irq", "/etc/passwd"]
    assert box.run("ls /secret /proc/irq; cat /etc/passwd").split() == ["/proc/irq:", "/secret:"]


@pytest.mark.parametrize("layers", [1, 60])
def test_an_overlay_is_mounted_by_the_old_system_call(tmp_path: Path, layers: int) -> None:
    deep = tmp_path / ("long-" * 8)
    lower = []
    for number in range(layers):
        folder = deep / f"layer{number:02}-{'x' * 20}" / "fs"
        folder.mkdir(parents=True)
        (folder / f"f{number}").touch()
        (folder / "top").write_text(str(number))
        lower.append(str(folder))
    for name in ("u:p,per", "work"):
        (tmp_path / name).mkdir()
    mount = detached.open_overlay(
        lower, str(tmp_path / "u:p,per"), str(tmp_path / "work"), (("volatile", None),)
    )
    try:
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        folder = os.open(".", os.O_RDONLY, dir_fd=mount)
        names = sorted(os.listdir(folder))
        os.close(folder)
        assert names == sorted(["top", *(f"f{n}" for n in range(layers))])
        descriptor = os.open("top", os.O_RDONLY, dir_fd=mount)
        assert os.read(descriptor, 10) == b"0"
        os.close(descriptor)
        os.close(os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=mount))
        assert (tmp_path / "u:p,per/new").exists()
    finally:
        os.close(mount)
