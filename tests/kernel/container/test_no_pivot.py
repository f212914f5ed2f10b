"""`--no-pivot`, for a root on a ramdisk: the container's root covers the host's, and nothing of
procfs and sysfs shows through.

Also a container without a mount namespace: a chroot, with warnings about what cannot be done.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyrunc.container.create import create
from pyrunc.errors import InvalidSpec
from tests.kernel.box import Box, finish, mounts


@pytest.mark.parametrize("overlay", [True, False])
def test_the_root_of_a_container_covers_the_hosts(box: Box, overlay: bool) -> None:
    text = box.run("pwd; ls /; cat /proc/self/mountinfo", pivot=False, overlay=overlay)
    assert text.splitlines()[0] == "/"
    mounted = mounts("\n".join(line for line in text.splitlines() if " - " in line))
    assert "home" in text.split()
    assert mounted["/proc"][1] == "proc" and mounted["/sys"][1] == "sysfs"
    with box.running(pivot=False, overlay=overlay) as (created, request):
        assert "home" in os.listdir(f"/proc/{created.pid}/root/")
        script = "touch /x; ls /x; readlink /proc/1/root"
        assert box.execute(created, request, script).split() == ["/x", "/"]


@pytest.mark.parametrize("pivot", [True, False])
def test_no_process_gets_a_procfs_without_its_masks(box: Box, pivot: bool) -> None:
    """A process in a new user namespace cannot mount a procfs or sysfs without the masks."""
    box.linux["maskedPaths"] = ["/proc/keys"]
    # The kernel permits this only where an unmasked one is mounted already, so the host's must not
    # be visible (fs/namespace.c, mount_too_revealing).
    script = "unshare -U -r -m -p -f busybox mount -t {0} {0} /tmp 2>&1; true"
    assert "permission denied" in box.run(f"busybox {script.format('proc')}", pivot=pivot)
    box.linux["maskedPaths"] = ["/sys/power"]
    assert "permission denied" in box.run(
        f"busybox {script.replace('-p -f', '-n').format('sysfs')}", pivot=pivot
    )


def test_masks_and_read_only_roots_hold(box: Box) -> None:
    box.linux["maskedPaths"] = ["/etc/passwd"]
    box.config["root"]["readonly"] = True
    text = box.run("cat /etc/passwd; touch /x 2>&1 || true; echo > /dev/null", pivot=False)
    assert text == "touch: /x: Read-only file system\n"


def test_a_create_container_hook_sees_a_root_without_pivot(box: Box, tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\nls > {tmp_path}/seen\n")
    hook.chmod(0o755)
    (tmp_path / "rootfs").mkdir()
    box.config["root"]["path"] = str(tmp_path / "rootfs")
    box.config["hooks"] = {"createContainer": [{"path": str(hook), "env": ["PATH=/bin:/usr/bin"]}]}
    assert "home" in box.run("ls /", pivot=False).split()
    assert "home" in (tmp_path / "seen").read_text().split()


def test_a_user_namespace_works_without_pivot_root(box: Box) -> None:
    box.linux["namespaces"].append({"type": "user"})
    box.linux["uidMappings"] = box.linux["gidMappings"] = [
        {"containerID": 0, "hostID": 100000, "size": 65536}
    ]
    assert box.run("id -u; ls /proc/1/exe", pivot=False).split() == ["0", "/proc/1/exe"]


@pytest.mark.parametrize("word", ["private", "rprivate"])
def test_a_private_root_needs_pivot_root(box: Box, word: str) -> None:
    box.linux["rootfsPropagation"] = word
    with pytest.raises(
        InvalidSpec, match=r"linux\.rootfsPropagation: private propagation needs pivot_root"
    ):
        box.run("true", pivot=False)


def test_without_a_mount_namespace_ignored_settings_are_warned_of(box: Box) -> None:
    box.linux.update(
        namespaces=[{"type": "pid"}, {"type": "uts"}], maskedPaths=[], readonlyPaths=[]
    )
    box.config["root"]["readonly"] = True
    before = Path("/proc/self/mountinfo").read_text().count(str(box.folder))
    created = create(box.request("true", overlay=False))
    assert finish(created) == 0
    (warning,) = [w for w in created.warnings if "mount namespace" in w]
    assert warning.startswith("without a mount namespace these are left out: mounts[0], mounts[1]")
    assert warning.endswith("root.readonly")
    assert Path("/proc/self/mountinfo").read_text().count(str(box.folder)) == before
