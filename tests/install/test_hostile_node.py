"""Tests `install-node`, which the package's scripts run as root, on a node that has links, pipes,
devices, folders or files of another user at the paths of its files."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from cri_server.install import node
from tests.install.test_install_node import PROGRAM, root

__all__ = ["root"]
PLACES = {
    "configuration": "etc/pyrunc/config.toml",
    "record": node.RECORD.lstrip("/"),
    "plugin": "opt/cni/bin/bridge",
}
CASES = [
    ("configuration", "pipe"),
    ("record", "pipe"),
    ("plugin", "pipe"),
    ("configuration", "endless device"),
    ("configuration", "dangling link"),
    ("plugin", "link to a file"),
    ("record", "folder"),
]


def put(place: Path, kind: str, canary: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "endless device":
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    elif kind == "link to a file":
        place.symlink_to(canary)
    elif kind == "dangling link":
        place.symlink_to(canary.with_name("new"))
    else:
        place.mkdir()


def install(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `install-node` with 1 GiB of address space and a time limit."""
    return subprocess.run(
        ["prlimit", "--as=1073741824", PROGRAM, "install-node", "--root", root, *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("place", "kind"), CASES)
def test_an_obstacle_at_the_path_of_a_file_does_no_harm(
    root: Path, tmp_path: Path, place: str, kind: str
) -> None:
    """`install-node` and `install-node --uninstall` end with success or with an error that names
    the path of the obstacle. The target of a link is unchanged, and no file is made there."""
    canary = tmp_path / "canary"
    canary.write_text("canary\n")
    canary.chmod(0o604)
    before = canary.stat()
    put(root / PLACES[place], kind, canary)
    for words in ((), ("--uninstall", "--purge")):
        done = install(root, *words)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or PLACES[place] in done.stderr, done.stderr
    after = canary.stat()
    assert canary.read_text() == "canary\n" and not canary.with_name("new").exists()
    assert (after.st_mode, after.st_ino, after.st_uid) == (
        before.st_mode,
        before.st_ino,
        before.st_uid,
    )


def test_links_in_a_folder_of_another_user_are_not_followed(root: Path, tmp_path: Path) -> None:
    """/etc/pyrunc belongs to user 1000, who has put links at the temporary names of new files. The
    links' target must stay unchanged, and the configuration must belong to root."""
    canary = tmp_path / "canary"
    canary.write_text("canary\n")
    folder = root / "etc/pyrunc"
    folder.mkdir()
    for name in ("config.toml.tmp", "config.toml.new", ".config.toml", "config.toml~"):
        (folder / name).symlink_to(canary)
    os.chown(folder, 1000, 1000)
    assert install(root).returncode == 0
    assert canary.read_text() == "canary\n"
    status = (folder / "config.toml").lstat()
    assert stat.S_ISREG(status.st_mode) and status.st_uid == 0
