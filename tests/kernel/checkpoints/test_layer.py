"""Tests that a writable layer is restored from its archive: files, removals, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
import tarfile
import threading
from pathlib import Path

import pytest

from cri_server.checkpoints import layer, names, read
from cri_server.images.layers import unpack
from cri_server.images.layers.inflate import TarStream, UnpackLimits
from pyrunc.errors import InvalidArgument, Unsupported

OPAQUE = "trusted.overlay.opaque"


def whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, 0)


def no_lower() -> int:
    raise AssertionError("nobody needs the image")


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    folder = tmp_path / "upper"
    folder.mkdir()
    return folder


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return tmp_path / "diff.tar"


def opener(folder: Path) -> int:
    return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def test_a_layers_files_are_the_same_after_a_restore(
    upper: Path, tar: Path, tmp_path: Path
) -> None:
    (upper / "etc").mkdir(mode=0o750)
    (upper / "etc/plain").write_bytes(b"content")
    os.chown(upper / "etc/plain", 12, 34)
    os.chmod(upper / "etc/plain", 0o4711)
    os.setxattr(upper / "etc/plain", "user.note", b"\x00\xff")
    os.utime(upper / "etc/plain", ns=(0, 1_234_567_890_000_000_000))
    os.link(upper / "etc/plain", upper / "same")
    os.symlink("/etc/../../plain", upper / "link")
    os.mkfifo(upper / "pipe", 0o622)
    os.mknod(upper / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    whiteout(upper / "etc/gone")
    (upper / os.fsdecode(b"\xff name")).write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(upper / "socket"))
    removed = layer.write(str(upper), str(tar), no_lower)
    assert removed == ["/etc/gone"] and stat.S_IMODE(tar.stat().st_mode) == 0o600

    folder = tmp_path / "new"
    folder.mkdir()
    number = os.open(tar, os.O_RDONLY)
    unpack.unpack(TarStream(number), str(folder), None, UnpackLimits())
    os.close(number)
    read.finish_layer(str(folder), removed)
    tree = folder / "tree"
    status = os.stat(tree / "etc/plain")
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (12, 34, 0o4711)
    assert (
        int(status.st_mtime) == 1_234_567_890
        and os.getxattr(tree / "etc/plain", "user.note") == b"\x00\xff"
    )
    assert (
        os.path.samefile(tree / "etc/plain", tree / "same")
        and (tree / "same").read_bytes() == b"content"
    )
    assert os.readlink(tree / "link") == "/etc/../../plain" and stat.S_ISFIFO(
        (tree / "pipe").stat().st_mode
    )
    assert os.stat(tree / "null").st_rdev == os.makedev(1, 3)
    gone = os.stat(tree / "etc/gone")
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert (tree / os.fsdecode(b"\xff name")).exists() and not (tree / "socket").exists()
    assert stat.S_IMODE((tree / "etc").stat().st_mode) == 0o750


def test_files_that_a_folder_hides_are_removed(upper: Path, tar: Path, tmp_path: Path) -> None:
    """Files of the image that an opaque folder hides are recorded as removed, also those below a
    folder in it."""
    lower = tmp_path / "lower"
    for name in ("a/keep", "a/gone", "a/sub/old", "b/other"):
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).touch()
    (upper / "a/sub").mkdir(parents=True)
    (upper / "a/keep").touch()
    os.setxattr(upper / "a", OPAQUE, b"y")
    assert layer.write(str(upper), str(tar), lambda: opener(lower)) == ["/a/gone", "/a/sub/old"]
    with tarfile.open(tar) as archive:
        assert archive.getnames() == [".", "a", "a/keep", "a/sub"]
        assert not any(OPAQUE in key for member in archive for key in member.pax_headers)


def test_the_tar_has_the_files_of_volumes_but_not_of_mounts(
    upper: Path, tar: Path, tmp_path: Path
) -> None:
    (upper / "etc").mkdir()
    (upper / "etc/hosts").touch()
    (upper / "data").mkdir()
    volume = tmp_path / "volume"
    (volume / "below").mkdir(parents=True)
    (volume / "below/file").write_bytes(b"kept")
    layer.write(str(upper), str(tar), no_lower, ["/etc/hosts", "/data"], {"/data": str(volume)})
    with tarfile.open(tar) as archive:
        assert archive.getnames() == [".", "etc", "data", "data/below", "data/below/file"]


def test_a_file_with_redirected_data_is_refused(upper: Path, tar: Path) -> None:
    (upper / "moved").mkdir()
    os.setxattr(upper / "moved", "trusted.overlay.redirect", b"/elsewhere")
    with pytest.raises(Unsupported, match=r"'moved': .*trusted\.overlay\.redirect"):
        layer.write(str(upper), str(tar), no_lower)


@pytest.mark.parametrize("name", [b"user.a=b", b"user.\xff", b"user.\xc3"])
def test_an_attribute_that_no_tar_can_hold_is_refused(upper: Path, tar: Path, name: bytes) -> None:
    (upper / "file").touch()
    os.setxattr(upper / "file", name, b"value")
    with pytest.raises(
        Unsupported,
        match=r"'file' has the extended attribute 'user\..*', whose name a tar cannot store",
    ):
        layer.write(str(upper), str(tar), no_lower)


def test_a_deep_tree_is_written(upper: Path, tar: Path) -> None:
    """A tree that is deeper than PATH_MAX is archived whole."""
    folder = os.open(upper, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d" * 100, dir_fd=folder)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    layer.write(str(upper), str(tar), no_lower)
    with tarfile.open(tar) as archive:
        assert len(archive.getnames()) == 301


def test_a_whiteout_behind_a_link_to_the_host_is_refused(tmp_path: Path) -> None:
    """A hostile archive has a link to the host in the path of a deleted file: the deletion is
    refused."""
    folder, outside = tmp_path / "new", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    content = tmp_path / "diff.tar"
    with tarfile.open(content, "w") as archive:
        member = tarfile.TarInfo("way")
        member.type, member.linkname = tarfile.SYMTYPE, str(outside)
        archive.addfile(member)
    number = os.open(content, os.O_RDONLY)
    unpack.unpack(TarStream(number), str(folder), None, UnpackLimits())
    os.close(number)
    with pytest.raises(InvalidArgument, match=f"{names.DELETED} names '/way/file'"):
        read.finish_layer(str(folder), ["/way/file"])
    assert not list(outside.iterdir())


def test_a_file_that_became_a_pipe_is_not_opened(
    upper: Path, tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a file becomes a pipe before it is archived, the archive fails at once."""
    (upper / "plain").write_bytes(b"")
    # A container that is not frozen may share this /dev/shm and put a pipe there: a wait for the
    # pipe's writer would keep the other containers frozen.
    os.mkfifo(upper / "file")
    real, plain = os.stat, os.stat(upper / "plain")
    monkeypatch.setattr(
        os, "stat", lambda path, **more: plain if path == b"file" else real(path, **more)
    )
    late = threading.Timer(5, lambda: os.close(os.open(upper / "file", os.O_RDWR)))  # ends the wait
    late.start()
    try:
        with pytest.raises(OSError, match="not a regular file any more"):
            layer.write(str(upper), str(tar), no_lower)
        assert late.is_alive()
    finally:
        late.cancel()
        late.join()


def test_holes_in_the_images_of_an_archive_take_no_disk_space(tmp_path: Path) -> None:
    """Holes in CRIU's image files stay holes on the disk: an archive of a few bytes may hold a file
    of many gigabytes."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / names.IMAGES).mkdir(parents=True)
    target.mkdir()
    for name in (names.CONFIG, names.SPEC):
        (source / name).write_text("{}")
    with open(source / names.IMAGES / "pages-1.img", "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"page")
    number = opener(source)
    try:
        read.take(read.Take(str(target)).to_fields(), [number])
    finally:
        os.close(number)
    image = target / names.IMAGES / "pages-1.img"
    assert image.stat().st_size == 1 << 30 and image.stat().st_blocks < 1 << 10
    with open(image, "rb") as file:
        file.seek(1 << 29)
        assert file.read(5) == b"page\0"
