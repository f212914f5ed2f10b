"""Labels on real files: file systems store the attribute whether or not SELinux runs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cri_server.security.selinux import relabel
from pyrunc.errors import InvalidArgument, KernelError
from pyrunc.kernel.tree import remove_path

PROJECT = Path(__file__).parents[4]
LABEL, BEFORE = b"system_u:object_r:container_file_t:s0:c1,c2", b"system_u:object_r:usr_t:s0"


def label_of(path: Path) -> bytes | None:
    try:
        return os.getxattr(path, relabel.ATTRIBUTE, follow_symlinks=False)
    except OSError:
        return None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "volume"
    (root / "folder/deep").mkdir(parents=True)
    (root / "file").write_text("x")
    (root / "folder/deep/secret").write_text("x")
    (root / "folder/deep/secret").chmod(0)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("x")
    os.setxattr(tmp_path / "outside/file", relabel.ATTRIBUTE, BEFORE)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "folder/link").symlink_to("../../outside/file")
    return root


def test_relabelling_covers_the_volume_and_no_target_of_a_link(tree: Path, tmp_path: Path) -> None:
    relabel.relabel(relabel.Relabel([str(tree)], LABEL.decode()).to_fields(), [])
    below = sorted(tree.rglob("*"))
    assert len(below) == 6
    assert {path: label_of(path) for path in (tree, *below)} == dict.fromkeys((tree, *below), LABEL)
    assert label_of(tmp_path / "outside/file") == BEFORE and label_of(tmp_path / "outside") is None


def test_files_with_the_label_are_not_changed(tree: Path) -> None:
    relabel.relabel_tree(str(tree), LABEL)
    before = {path: path.lstat().st_ctime_ns for path in tree.rglob("*")}
    relabel.relabel_tree(str(tree), LABEL)
    assert {path: path.lstat().st_ctime_ns for path in tree.rglob("*")} == before


def test_a_single_file_is_relabelled(tree: Path) -> None:
    relabel.relabel_tree(str(tree / "file"), LABEL)
    assert label_of(tree / "file") == LABEL and label_of(tree) is None


@pytest.mark.parametrize("path", ["link", "link/file"])
def test_a_link_that_came_into_the_path_is_an_error(tree: Path, tmp_path: Path, path: str) -> None:
    with pytest.raises(KernelError, match="ELOOP"):
        relabel.relabel_tree(str(tree / path), LABEL)
    assert label_of(tmp_path / "outside") is None and label_of(tmp_path / "outside/file") == BEFORE


@pytest.mark.parametrize("kind", ["another file system", "folder of the same file system", "file"])
def test_mounts_below_a_volume_keep_their_labels(tree: Path, tmp_path: Path, kind: str) -> None:
    """Relabelling leaves out file systems, folders and files that are mounted inside the volume."""
    # A bind of the same file system has the volume's st_dev, and a bind-mounted file is no folder,
    # but both lead out of the volume.
    place, source = {
        "another file system": (tree / "folder/deep", "-t tmpfs t"),
        "folder of the same file system": (tree / "folder/deep", f"--bind {tmp_path}/outside"),
        "file": (tree / "file", f"--bind {tmp_path}/outside/file"),
    }[kind]
    program = (
        "import os, sys; from cri_server.security.selinux import relabel\n"
        "def read(path): return relabel.ATTRIBUTE in os.listxattr(path) and os.getxattr(path, "
        "relabel.ATTRIBUTE)\n"
        "before = read(sys.argv[3]); relabel.relabel_tree(sys.argv[1], sys.argv[2].encode())\n"
        "print(before == read(sys.argv[3]))"
    )
    script = f'mount {source} {place} && exec {sys.executable} -c "$0" "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, program]
    arguments = [str(tree), LABEL.decode(), str(place)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=True, cwd=PROJECT
    )
    assert done.stdout == "True\n" and label_of(tree / "folder") == LABEL
    assert label_of(tmp_path / "outside/file") == BEFORE and label_of(tmp_path / "outside") is None


def test_relabelling_does_not_follow_swapped_links(tree: Path, tmp_path: Path) -> None:
    """No file outside a volume gets a label while a container swaps a folder and a file with links
    that lead outside."""
    for name in ("folder", "file"):
        (tree / f"{name}.out").symlink_to(
            tmp_path / "outside" / ("" if name == "folder" else "file")
        )
    program = (
        "import ctypes\n"
        "exchange = ctypes.CDLL(None).renameat2\n"
        "print(flush=True)\n"
        "while True:\n"
        "    for name in (b'folder', b'file'): exchange(-100, name, -100, name + b'.out', 2)\n"
    )
    racing = subprocess.Popen([sys.executable, "-c", program], cwd=tree, stdout=subprocess.PIPE)
    seen = set()
    try:
        assert racing.stdout is not None and racing.stdout.readline() == b"\n"
        for number in range(50):
            relabel.relabel_tree(str(tree), LABEL + b",c%d" % number)
            seen.add((tree / "folder").is_symlink())
        while len(seen) < 2:
            seen.add((tree / "folder").is_symlink())
        assert racing.poll() is None
    finally:
        racing.kill()
        racing.communicate()
    assert label_of(tmp_path / "outside/file") == BEFORE and label_of(tmp_path / "outside") is None


def test_a_fifo_is_labelled_and_not_opened(tree: Path) -> None:
    """A FIFO is labelled without open(2), which would wait for a writer."""
    os.mkfifo(tree / "fifo")
    relabel.relabel_tree(str(tree), LABEL)
    assert label_of(tree / "fifo") == LABEL


@pytest.mark.parametrize("path", ["/", "/etc", "/usr/", "/var/lib", "/var/lib/kubelet", "/proc/1",
    "/sys/fs", "/dev/shm", "/var/../etc"])  # fmt: skip
def test_paths_of_the_system_are_refused(path: str) -> None:
    with pytest.raises(InvalidArgument, match=r"selinux_relabel: .* keeps its SELinux labels"):
        relabel.relabel(relabel.Relabel([path], "a:b:c").to_fields(), [])


def test_a_file_system_without_labels_is_no_error() -> None:
    relabel.relabel_tree(f"/proc/{os.getpid()}/attr", LABEL)


def test_a_volume_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="gone"):
        relabel.relabel_tree(str(tmp_path / "gone"), LABEL)


def test_a_tree_deeper_than_a_path_is_relabelled(tmp_path: Path) -> None:
    """The last of 3000 nested folders gets the label, with 64 descriptors."""
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64 + folder, before[1]))
    try:
        # Recursion would end after a thousand.
        relabel.relabel_tree(str(tmp_path), LABEL)
        assert os.getxattr(f"/proc/self/fd/{folder}", relabel.ATTRIBUTE).rstrip(b"\0") == LABEL
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(folder)
        remove_path(tmp_path / "d")
