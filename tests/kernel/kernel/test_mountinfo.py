"""Tests the list of mounts, with mount points of every name that the kernel accepts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cri_server.store.file_system import file_system_type
from pyrunc.abi.clone import CLONE_NEWNS
from pyrunc.abi.mount import MS_PRIVATE, MS_REC
from pyrunc.kernel import mount, namespace
from pyrunc.kernel.mountinfo import mount_points


@pytest.mark.parametrize(
    "name", [b"a b", b"a\rb", b"a\nb", b"a\\040b", "größe".encode(), b"\xff", b"a - b"]
)
def test_a_mount_point_can_have_any_name(tmp_path: Path, name: bytes) -> None:
    place = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(place)
    pid = os.fork()
    if not pid:
        is_listed = False
        try:
            namespace.unshare(CLONE_NEWNS)
            mount.mount(None, "/", None, MS_REC | MS_PRIVATE)
            mount.mount("tmpfs", place, "tmpfs")
            [point] = [m for m in mount_points() if m.path == os.fsdecode(place)]
            is_listed = (point.kind, point.root, point.propagation) == ("tmpfs", "/", set())
            is_listed &= file_system_type(Path(point.path)) == "tmpfs"
        finally:
            os._exit(0 if is_listed else 1)
    assert os.waitpid(pid, 0)[1] == 0
