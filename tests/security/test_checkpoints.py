"""Attacks with image files for CRIU from an untrusted source: CRIU, which runs as root, would open
the files by name.

Classes: CVE-2026-53489 (a link in a checkpoint, by which a file of the host is read), incomplete
and foreign images. tests/vm/oci tests that real dumps are restored.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from pyrunc.checkpoint.checkpoint import masked_files
from pyrunc.checkpoint.criu_images import is_external
from pyrunc.spec.model import Linux
from tests.security.attack import Canary, refused
from tests.system.harness import Box, Runtime

STREAMS = '["/dev/null","pipe:[7]","/dev/null"]'
IN_TIME_S = 5.0


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Make a folder of files with the names of a CRIU dump."""
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "descriptors.json").write_text(STREAMS)
    for name in ("inventory.img", "core-1.img", "pages-1.img", "pagemap-1.img"):
        (folder / name).write_bytes(b"\x10\x54\x52\x54" * 64)
    return folder


def restored(runtime: Runtime, images: Path, *words: str, options: tuple[str, ...] = ()) -> None:
    """Assert that `restore` fails within IN_TIME_S seconds with an error that contains one of
    `words`, and that no container remains."""
    box = runtime.box("sleep", "60")
    begin = time.monotonic()
    refused(
        runtime(
            "restore", "--bundle", str(box.folder), "--image-path", str(images), *options, box.id
        ),
        *words,
    )
    assert time.monotonic() - begin < IN_TIME_S
    assert not (runtime.root / box.id).exists()


def spoil(images: Path, kind: str, canary: Canary) -> None:
    """Replace an image file or CRIU's log by a link, a pipe or a device, or let `parent`, the link
    to the pre-dump, lead elsewhere."""
    place = images / "pages-1.img"
    place.unlink()
    if kind == "link":
        place.symlink_to(canary.path / "passwd")
    elif kind == "dangling":
        place.symlink_to(canary.path / "new")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    elif kind == "log":
        (images / "restore.log").symlink_to(canary.path / "passwd")
    elif kind == "parent's":
        (images.parent / "before").mkdir()
        (images.parent / "before/pages-1.img").symlink_to(canary.path / "passwd")
        (images / "parent").symlink_to("../before")
    else:
        (images / "parent").symlink_to(
            {"loop": ".", "absolute": str(canary.path), "nowhere": "../none"}[kind]
        )


KINDS = ["link", "dangling", "pipe", "device", "log", "parent's", "loop", "absolute", "nowhere"]


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_are_no_regular_files_are_refused(
    runtime: Runtime, images: Path, canary: Canary, kind: str
) -> None:
    """CVE-2026-53489: an image file of the dump or of its pre-dump, or CRIU's log, is a link to the
    host's canary, a pipe without a writer, or a device. `restore` fails within IN_TIME_S seconds
    with an error about this file, the canary is untouched, and no container, mount or cgroup
    remains."""
    spoil(images, kind, canary)
    words = {
        "loop": "parents",
        "absolute": "is an absolute link",
        "nowhere": "does not lead to a folder",
    }.get(kind, "not an image")
    restored(runtime, images, words, options=("--work-path", str(images)))


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_dump_does_not_write_through_links(
    runtime: Runtime, images: Path, canary: Canary, kind: str
) -> None:
    """CVE-2026-53489 for writing: the folder for the images has links under the names that CRIU
    will create and truncate. The checkpoint fails with an error that names the link, the canary is
    untouched, and the container runs on."""
    spoil(images, kind, canary)
    box = runtime.box("sleep", "60").up()
    refused(runtime("checkpoint", "--image-path", str(images), box.id), "not an image")
    assert box.status == "running"


@pytest.mark.parametrize(
    ("name", "content"),
    [("inventory.img", None), ("inventory.img", b""), ("descriptors.json", None),
    ("descriptors.json", b""),
     ("descriptors.json", b"{"), ("descriptors.json", b'{"0": "pipe:[1]"}'),
     ("descriptors.json", b"[1, 2, 3]"),
     ("descriptors.json", b'["a", "b", "c", "d"]'), ("descriptors.json", b"[" * 60_000),
     ("descriptors.json", b'["' + b"x" * 70_000 + b'"]')],
)  # fmt: skip
def test_incomplete_dumps_are_refused(
    runtime: Runtime, images: Path, name: str, content: bytes | None
) -> None:
    """The dump lacks its inventory or its list of standard streams, or the list is invalid. The
    error names the file, and no container remains."""
    (images / name).unlink()
    if content is not None:
        (images / name).write_bytes(content)
    restored(runtime, images, name)


@pytest.mark.parametrize("content", [b"\x10\x54\x52\x54", b"\0" * 4096, os.urandom(4096)])
def test_images_that_criu_refuses_leave_nothing(
    runtime: Runtime, images: Path, content: bytes
) -> None:
    """The image files are not in CRIU's format. The error has CRIU's message, and neither cgroup,
    mount namespace, state nor a CRIU process remains."""
    (images / "inventory.img").write_bytes(content)
    restored(runtime, images, "criu")


def test_only_pipes_and_files_of_other_mounts_are_replaced_by_descriptors() -> None:
    """A dump's list of streams names the files that CRIU replaces by descriptors of the runtime.
    Only the name of a pipe (by inode) or of a file (by mount and inode) is accepted."""
    assert is_external("pipe:[123]") and is_external("file[1a:2f]")
    for name in (
        *("", "/etc/passwd", "pipe:", "pipe:[]", "pipe:[1]x", "pipe:[1:2]", "pipe:[../1]",
        "pipe:[1\0]", "pipe[1]"),
        *("file[1]", "file[1:2:3]", "file[1:g]", "file[:]", "file[1:2", "tty[1:2]",
        "net[1]:extRootNetNS"),
    ):  # fmt: skip
        assert not is_external(name), name


def test_masked_paths_are_looked_up_in_the_container(
    runtime: Runtime, rootfs: Path, tmp_path: Path, canary: Canary
) -> None:
    """`checkpoint` checks which masked paths are files, and a link of the image leads one of them
    to the host's canary. Only paths within the container's root are found."""
    (rootfs / "data").symlink_to(canary.path)
    (rootfs / "folder").mkdir()
    (rootfs / "file").write_text("")
    box: Box = runtime.box("sleep", "60").up()
    paths = ("/data/passwd", "/file", "/folder", "/missing")
    root = os.open(f"/proc/{box.pid}/root", os.O_PATH)
    try:
        assert masked_files(Linux(masked_paths=paths), root) == ["/file"]
    finally:
        os.close(root)
