"""Tests root directories on unusual mounts: the server uses the suitable ones, and refuses the
others before it answers any client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cri.server_harness import Server

DEVICES_AND_PROGRAMS = """
mknod /null c 1 3 && echo x >/null || exit 1
printf '#!/bin/sh\\nexit 7\\n' >/own && chmod 4755 /own || exit 2
/own; [ $? = 7 ] || exit 3
grep -E '^[0-9]+ [0-9]+ [0-9:]+ / / [a-z,]*(nodev|noexec|nosuid)' /proc/self/mountinfo && exit 4
echo fine
"""


def test_a_containers_root_does_not_inherit_mount_flags_of_the_servers_root() -> None:
    with Server(mount=("-t", "tmpfs", "-o", "nodev,noexec,nosuid", "disk")) as server:
        server.load_image()
        container = server.launch(server.run_pod())
        assert server.output(container, "sh", "-c", DEVICES_AND_PROGRAMS) == "fine\n"
        assert "noexec: CNI plugins" in server.tail(200)


def test_a_root_that_can_hold_no_container_is_refused_at_start(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    words = r"pyrunc-cri: /tmp/\S+/root is on overlay, where overlayfs cannot write a layer"
    with (
        pytest.raises(AssertionError, match=words),
        Server(mount=("-t", "overlay", "-o", layers, "root")),
    ):
        pass
