"""Attacks with a hostile /dev of an image or a volume: its nodes, its links, its terminals.

Classes: CVE-2026-41579 and CVE-2026-47766 (/dev is a link), CVE-2025-31133 and CVE-2025-62161
(/dev/null is another file, so that masked paths are not masked), CVE-2025-52565 (/dev/console).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.attack import Canary, Swapping, bind, refused, slowly
from tests.system.console import receive_terminal
from tests.system.harness import Runtime

Config = dict[str, Any]
CLIMB = "../../../../../../../../../.."


def without_dev(config: Config) -> None:
    config["mounts"] = [m for m in config["mounts"] if not m["destination"].startswith("/dev")]


@pytest.mark.parametrize("with_pts", [False, True], ids=["", "pts"])
@pytest.mark.parametrize("target", ["{canary}", CLIMB + "{canary}", "/tmp/../{canary}", "pts"])
def test_dev_as_a_link_is_not_followed(
    runtime: Runtime, rootfs: Path, tmp_path: Path, canary: Canary, target: str, with_pts: bool
) -> None:
    """CVE-2026-41579, CVE-2026-47766: the image's /dev or /dev/pts is a link to the host's canary
    folder, and no /dev is mounted over it. The canary's files are neither opened nor changed."""
    place = rootfs / "dev"
    if target == "pts":  # /dev is a folder, /dev/pts the link
        (place / "pts").symlink_to(canary.path)
        (place / "shm").symlink_to(CLIMB + str(canary.path))
    else:
        place.rmdir()
        place.symlink_to(target.format(canary=canary.path))

    def change(config: Config) -> None:
        mounts = [
            m for m in config["mounts"] if with_pts and m["destination"] in ("/dev/pts", "/dev/shm")
        ]
        without_dev(config)
        config["mounts"] += mounts

    # Vulnerable runtimes replace `ptmx`. Debian's runc 1.1.5 makes links in the canary.
    runtime.run("true", change=change)
    box = runtime.box("true", change=change)
    if box.create().code == 0:
        box.start()


def _link(path: Path) -> None:
    path.symlink_to("/proc/sys/kernel/core_pattern")


def _file(path: Path) -> None:
    path.write_text("attacker's\n")


def _zero(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def _block(path: Path) -> None:
    os.mknod(path, stat.S_IFBLK | 0o666, os.makedev(1, 3))


HOSTILE: list[Callable[[Path], object]] = [
    _link,
    _file,
    _zero,
    _block,
    os.mkfifo,
    Path.mkdir,
    lambda path: None,
]
NAMES = ["link", "file", "zero", "block", "pipe", "folder", "missing"]


def dev_folder(tmp_path: Path) -> Path:
    """Make a folder to mount as a container's /dev, with all default devices except null."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name, minor in (("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(folder / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    return folder


@pytest.mark.parametrize("make", HOSTILE, ids=NAMES)
def test_a_null_that_is_no_null_device_is_refused(
    runtime: Runtime, rootfs: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """CVE-2025-31133, CVE-2025-62161: a volume is mounted as /dev, and its null, which is to mask
    /secret, is a link to core_pattern, a file, another device or missing. Create fails, and /secret
    is not readable."""
    make(dev_folder(tmp_path) / "null")
    (rootfs / "secret").write_text("secret\n")

    def change(config: Config) -> None:
        without_dev(config)
        config["mounts"].append(bind(tmp_path / "dev", "/dev"))

    result = runtime.run("cat", "/secret", change=change, maskedPaths=["/secret"])
    # With Debian's runc 1.1.5 the container reads the attacker's file through the mask.
    assert "secret" not in result.out and "attacker" not in result.out
    refused(result)


def test_a_swapped_null_is_not_used_as_a_mask(
    runtime: Runtime, rootfs: Path, probe: Path, tmp_path: Path
) -> None:
    """CVE-2025-31133 with a race: a neighbour swaps /dev/null, which masks /secret, with a file and
    back. No container reads data through the mask, and each has a null device as stdin."""
    folder = dev_folder(tmp_path)
    os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    _file(folder / "other")
    (rootfs / "secret").write_text("secret\n")

    def change(config: Config) -> None:
        without_dev(config)
        config["mounts"].append(bind(folder, "/dev"))

    slow = slowly(runtime, ["statx", "open_tree", "move_mount", "dup3"], 2)
    script = ("sh", "-c", "cat /secret; stat -L -c %t:%T /proc/self/fd/0")
    with Swapping(probe, folder / "null", folder / "other", 500) as swaps:
        for _ in range(8):
            result = slow.run(*script, change=change, maskedPaths=["/secret"])
            assert result.code or result.out == "1:3\n", result
    assert swaps.count > 50
    assert runtime.run(*script, change=change, maskedPaths=["/secret"]).ok().out == "1:3\n"


@pytest.mark.parametrize("name", ["null", "zero", "tty", "full"])
@pytest.mark.parametrize("make", HOSTILE[:-1], ids=NAMES[:-1])
def test_a_file_in_place_of_a_default_device_is_refused(
    runtime: Runtime, rootfs: Path, canary: Canary, make: Callable[[Path], object], name: str
) -> None:
    """Without a /dev mount, the image's own file, link or folder is in the place of a default
    device. The runtime refuses the container and follows no link to the host."""
    if name == "zero" and make is _zero:
        return
    make(rootfs / "dev" / name)
    refused(runtime.run("true", change=without_dev))


@pytest.mark.parametrize(
    "target", ["{canary}/passwd", "/proc/sys/kernel/core_pattern", "/etc/passwd", "/no/such"]
)
def test_console_as_a_link_is_not_followed(
    runtime: Runtime, rootfs: Path, tmp_path: Path, canary: Canary, target: str
) -> None:
    """CVE-2025-52565: the image's /dev/console is a link, and the container's terminal is to be
    mounted there. The mount is at /dev/console itself and not at the link's target, or create
    fails."""
    (rootfs / "dev/console").symlink_to(target.format(canary=canary.path))

    def change(config: Config) -> None:
        config["mounts"] = [m for m in config["mounts"] if m["destination"] != "/dev"]
        config["process"]["terminal"] = True
        config["mounts"].insert(
            1, {"destination": "/dev/pts", "type": "devpts", "source": "devpts"}
        )

    box = runtime.box("sh", "-c", "grep devpts /proc/self/mountinfo; echo end", change=change)
    with receive_terminal(tmp_path / "c") as console:
        if box.create("--console-socket", str(console.path)).code:
            return
        box.start().ok()
        lines = console.read_until(b"end").decode().splitlines()
    points = {line.split()[4] for line in lines if " - devpts " in line}
    assert points <= {"/dev/pts", "/dev/console"}, points


@pytest.mark.parametrize(
    "make", [_link, _file, _zero, os.mkfifo], ids=["link", "file", "zero", "pipe"]
)
def test_a_ptmx_that_is_no_multiplexer_is_refused(
    runtime: Runtime, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    """CVE-2025-52565: /dev/pts is a folder of a volume, and its ptmx is a link, a file, a pipe or
    another device. Create fails, and the caller gets no terminal."""
    folder = dev_folder(tmp_path)
    os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "pts").mkdir()
    make(folder / "pts/ptmx")

    def change(config: Config) -> None:
        without_dev(config)
        config["mounts"].append(bind(folder, "/dev"))
        config["process"]["terminal"] = True

    box = runtime.box("true", change=change)
    with receive_terminal(tmp_path / "c") as console:
        refused(box.create("--console-socket", str(console.path)))


def test_the_terminal_belongs_to_the_containers_devpts(runtime: Runtime, tmp_path: Path) -> None:
    """CVE-2025-52565 does not concern ordinary images: with an ordinary /dev, /dev/console is a
    terminal of the container's own devpts."""

    def change(config: Config) -> None:
        config["process"]["terminal"] = True

    box = runtime.box(
        "sh", "-c", "stat -c %t-%n /dev/console; tty; ls /dev/pts; echo end", change=change
    )
    with receive_terminal(tmp_path / "c") as console:
        box.create("--console-socket", str(console.path)).ok()
        box.start().ok()
        text = console.read_until(b"end").decode()
    assert "88-/dev/console" in text and "/dev/pts/0" in text
