"""Tests that the keeper stores the mounts of images for the next server, under systemd with our
unit's directives."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cri_server.images.archives import build
from cri_server.images.store.mount_store import PREFIX
from pyrunc.keeper.client import Keeper
from tests.cri.server_harness import REPOSITORY
from tests.support.page_cache import cached_pages
from tests.support.processes import wait_until

UNIT = "pyrunc-stored-mounts.service"
UNIT_FILE = Path("/run/systemd/system") / UNIT
SHIPPED = REPOSITORY / "cri_server/install/data/pyrunc-cri.service"
PROGRAM = [sys.executable, "-m", "cri_server.cli.main"]
IMAGE, CONTENT = "registry.test/stored:1", os.urandom(500_000)
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "stored"},
    "spec": {
        "hostNetwork": True,
        "containers": [{"name": "main", "image": IMAGE, "command": ["sleep", "3600"]}],
    },
}


def systemctl(*words: str) -> str:
    return subprocess.run(
        ["systemctl", *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def unit_property(name: str) -> str:
    return systemctl("show", "-P", name, UNIT)


def client(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "--address", f"unix://{folder}/cri.sock", *words],
        cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Provide the folder of a server under systemd, with the directives of its unit, and with a pod
    whose image is mounted."""
    (tmp_path / "config.toml").write_text('[images]\nstore = "erofs"\n')
    places = [
        "--config",
        "config.toml",
        "--root",
        "root",
        "--state",
        "state",
        "--cni-conf-dir",
        "net.d",
    ]
    options = [f"{tmp_path}/{word}" if number % 2 else word for number, word in enumerate(places)]
    command = [*PROGRAM, "serve", *options, "--listen", f"unix://{tmp_path}/cri.sock"]
    lines = SHIPPED.read_text().replace("@PROGRAM@ serve", shlex.join(command))
    UNIT_FILE.write_text(
        lines.replace("[Service]\n", f"[Service]\nWorkingDirectory={REPOSITORY}\n")
    )
    layers = [*build.busybox().layers, build.layer({"big": CONTENT})]
    (tmp_path / "image.tar").write_bytes(build.docker_archive({IMAGE: build.image(layers)}))
    (tmp_path / "pod.json").write_text(json.dumps(POD))
    systemctl("daemon-reload")
    try:
        systemctl("start", UNIT)
        client(tmp_path, "image", "load", f"{tmp_path}/image.tar")
        client(tmp_path, "run", "--folder", f"{tmp_path}/pods", f"{tmp_path}/pod.json")
        yield tmp_path
        client(tmp_path, "image", "remove", IMAGE)
        assert wait_until(lambda: stored(tmp_path) == 0, 60)
    finally:
        systemctl("stop", UNIT)
        UNIT_FILE.unlink()
        systemctl("daemon-reload")


def stored(folder: Path) -> int:
    """Return how many mounts the server's keeper stores."""
    keeper = Keeper(folder / "state")
    try:
        return len(keeper.names(PREFIX))
    finally:
        keeper.close()


def mounted_file() -> Path:
    """Return the file with CONTENT in the mount that the server holds."""
    (mounted,) = (
        fd / "big"
        for fd in Path(f"/proc/{unit_property('MainPID')}/fd").iterdir()
        if (fd / "big").exists()
    )
    return mounted


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_the_next_server_gets_the_mount(folder: Path) -> None:
    assert stored(folder) == 1
    assert mounted_file().read_bytes() == CONTENT
    ways: list[Callable[[int], object]] = [
        killed,
        lambda pid: systemctl("restart", UNIT),
        lambda pid: (systemctl("stop", UNIT), systemctl("start", UNIT)),
    ]
    for end in ways:
        pid = int(unit_property("MainPID"))
        end(pid)
        assert wait_until(
            lambda pid=pid: (
                unit_property("ActiveState") == "active"
                and int(unit_property("MainPID")) not in (0, pid)
            ),
            300,
        )  # type: ignore[misc]
        assert stored(folder) == 1 and unit_property("NFileDescriptorStore") == "0"
        # A new mount would have no page of a file that only the previous server has read. (Whether
        # containers share pages depends on the kernel: Linux 6.15.)
        assert cached_pages(mounted_file()) and mounted_file().read_bytes() == CONTENT
    client(folder, "rm", "--force", "--folder", f"{folder}/pods", "stored")
