"""Tests which mounts and streams `checkpoint` and `restore` name to CRIU. A program in CRIU's place
records the requests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyrunc.checkpoint.checkpoint import external_mount
from pyrunc.checkpoint.criu import EXTERNAL, message
from tests.support import bundle
from tests.system.harness import Box, Runtime, eventually

DESTINATIONS = ("/var/run/secrets", "/data", "/data/link", "/etc/resolv.conf")


@pytest.fixture
def request_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a criu into PATH that writes the request of `checkpoint` or `restore` to a file and then
    makes the command fail. Return the file."""
    file, program = tmp_path / "request", tmp_path / "programs/criu"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec dd bs=1M count=1 of={file} <&3 2>/dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return file


@pytest.fixture
def box(runtime: Runtime, tmp_path: Path) -> Box:
    """Make a container whose image has links at the mount points and at the masked path."""
    if not runtime.is_pyrunc:
        pytest.skip("our requests")
    root = bundle.make_root(tmp_path / "root")
    for folder in ("run", "var", "data"):
        (root / folder).mkdir()
    (root / "var/run").symlink_to("/run")
    (root / "data/link").symlink_to("/run")
    (root / "etc/resolv.conf").symlink_to("../run/resolv")
    (root / "secret").write_text("")
    (root / "masked").symlink_to("secret")

    def change(config: dict[str, Any]) -> None:
        config["root"]["path"] = str(root)
        for number, place in enumerate(DESTINATIONS):
            source = tmp_path / str(number)
            if place == "/etc/resolv.conf":
                source.touch()
            else:
                source.mkdir()
            mount = {"destination": place, "type": "bind", "source": str(source)}
            config["mounts"].append({**mount, "options": ["rbind"]})

    return runtime.box("sleep", "60", change=change, maskedPaths=["/masked"])


def test_a_mount_at_a_link_has_the_same_key_in_dump_and_restore(
    runtime: Runtime, box: Box, request_file: Path, tmp_path: Path
) -> None:
    box.up()
    lines = Path(f"/proc/{box.pid}/mountinfo").read_text().splitlines()
    mount_points = [line.split()[4] for line in lines]
    # The link /data/link is covered by the mount at /data.
    keys = ["/run/secrets", "/data", "/data/link", "/run/resolv"]
    assert set(keys) < set(mount_points)
    images = tmp_path / "images"
    runtime("checkpoint", "--image-path", str(images), box.id).fails("criu")
    dump = request_file.read_bytes()
    for key in keys:
        assert message([external_mount(key, key)]) in dump
    assert "/secret" in mount_points
    assert message([external_mount("/secret", "/dev/null")]) in dump

    box.delete("--force").ok()
    (images / "inventory.img").write_bytes(b"any")
    runtime("restore", "--bundle", str(box.folder), "--image-path", str(images), box.id).fails(
        "criu"
    )
    restore = request_file.read_bytes()
    for number, key in enumerate(keys):
        assert message([external_mount(key, str(tmp_path / str(number)))]) in restore


def test_a_redirected_stream_has_its_first_name(
    runtime: Runtime, request_file: Path, tmp_path: Path
) -> None:
    """`checkpoint` tells CRIU the stdout and stderr with which the container started, even if its
    program has redirected them to files since."""
    if not runtime.is_pyrunc:
        pytest.skip("our requests")
    box = runtime.box("sh", "-c", "echo begin; exec >/dev/shm/out 2>/dev/shm/err; exec sleep 60")
    file = tmp_path / "stdout"
    reading, writing = os.pipe()
    try:
        with open(file, "wb") as stdout:
            command = runtime.command("run", "--detach", "--bundle", str(box.folder), box.id)
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=writing, check=True
            )
            mount_id = mount_of(stdout.fileno())
        eventually(lambda: Path(f"/proc/{box.pid}/cmdline").read_bytes() == b"sleep\x0060\x00")
        assert os.readlink(f"/proc/{box.pid}/fd/1") == "/dev/shm/out"
        images = tmp_path / "images"
        runtime("checkpoint", "--image-path", str(images), box.id).fails("criu")
        name = f"file[{mount_id:x}:{file.stat().st_ino:x}]"
        assert message([(EXTERNAL, name)]) in request_file.read_bytes()
        streams = json.loads((images / "descriptors.json").read_text())
        assert streams == ["", name, f"pipe:[{os.fstat(writing).st_ino}]"]
    finally:
        os.close(reading)
        os.close(writing)


def mount_of(number: int) -> int:
    """Return the id of the mount of a descriptor's file."""
    fields = dict(
        line.split(":\t") for line in Path(f"/proc/self/fdinfo/{number}").read_text().splitlines()
    )
    return int(fields["mnt_id"])
