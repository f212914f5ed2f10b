"""Tests that layers mounted as an EROFS image show the same files as unpacked layers, and that
the same layers are refused either way."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cri_server.images.archives.build import LayerFile, directory, layer, symlink
from cri_server.images.layers.inflate import BadLayer, UnpackLimits
from cri_server.images.store.unpacked_layers import chain_ids
from pyrunc.errors import Error, ResourceExhausted
from tests.cri.images.conftest import unpack_bytes
from tests.cri.images.indexes import mounted
from tests.cri.images.test_hostile import (
    CONTAINED,
    OPAQUE,
    RAW,
    REFUSED,
    hardlink,
    header,
)
from tests.cri.images.test_unpack import BASE, Stack, make_everything, raw_tar
from tests.cri.images.trees import Facts, snapshot

LIMITS = UnpackLimits(size_bytes=64 << 20, entries=50_000)
ACL_HEAD = b"\x02\0\0\0"


def facts_of(root: Path) -> dict[bytes, Facts]:
    """Return a dict: path -> properties, of the files that a container would see in this folder."""
    return {
        name: replace(
            # trusted.* are overlayfs's own attributes
            facts,
            xattrs=frozenset(x for x in facts.xattrs if not x[0].startswith("trusted.")),
        )
        # a descriptor's name is a link
        for name, facts in snapshot(os.fsencode(root) + b"/.").items()
        if not (facts.kind == "c" and facts.device == 0)  # a whiteout
    }


def outcome(tars: Sequence[bytes], folder: Path) -> tuple[str, object]:
    """Mount the layers; return ("files", `facts_of` the mount), or ("refused", None)."""
    try:
        with mounted(folder, tars, LIMITS) as root:
            return "files", facts_of(root)
    except (BadLayer, ResourceExhausted):
        return "refused", None


def unpacked(tar: bytes, folder: Path) -> tuple[str, object]:
    """Unpack the layer; return ("files", `facts_of` its folder), or ("refused", None)."""
    folder.mkdir()
    try:
        unpack_bytes(tar, folder, LIMITS)
    except (BadLayer, ResourceExhausted):
        return "refused", None
    return "files", facts_of(folder / "tree")


def same(tar: bytes, folder: Path) -> tuple[str, object]:
    """Assert that unpacking and mounting a layer have the same `outcome`; return it."""
    expected, mounted = unpacked(tar, folder / "unpacked"), outcome([tar], folder / "mounted")
    assert mounted == expected
    return mounted


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_unpacking_refuses_are_refused(tmp_path: Path, case: str) -> None:
    assert same(raw_tar(*REFUSED[case]), tmp_path)[0] == "refused"


@pytest.mark.parametrize("case", RAW)
def test_raw_headers_that_unpacking_refuses_are_refused(tmp_path: Path, case: str) -> None:
    assert same(RAW[case], tmp_path)[0] == "refused"


@pytest.mark.parametrize("case", CONTAINED)
def test_mounted_layers_equal_unpacked_layers(tmp_path: Path, case: str) -> None:
    assert same(raw_tar(*CONTAINED[case][0]), tmp_path)[0] == "files"


@pytest.mark.parametrize(
    "options",
    [
        ["--format=posix", "--xattrs", "--xattrs-include=*"],
        ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=1.0"],
        ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.0"],
        ["--format=gnu", "--sparse"],
    ],
    ids=lambda options: " ".join(o.removeprefix("--") for o in options if "xattrs" not in o),
)
def test_every_kind_of_file_keeps_every_attribute(tmp_path: Path, options: list[str]) -> None:
    make_everything(tmp_path / "everything")
    archive = subprocess.run(
        ["tar", "-C", tmp_path / "everything", *options, "-c", "."], check=True, capture_output=True
    )
    kind, files = same(archive.stdout, tmp_path)
    assert kind == "files"
    if "--format=posix" in options:
        assert files == snapshot(tmp_path / "everything")


def test_names_and_links_of_every_length_are_read(tmp_path: Path) -> None:
    # directories of one block and of many; links in the block of their inode and in another block
    members = [
        (f"{'d' * length}/{'n' * length}", LayerFile(b"x" * length)) for length in range(1, 256, 13)
    ]
    members += [(f"many/{number:03}{'m' * (number % 250)}", LayerFile()) for number in range(700)]
    members += [
        (f"links/{length}", symlink("l" * length))
        for length in (1, 59, 447, 448, 449, 511, 512, 513, 4000, 4095)
    ]
    members += [
        ("-before-dot", LayerFile()),
        ("a-file-of-a-block", LayerFile(b"x" * 512)),
        ("and-one-more", LayerFile(b"x" * 513)),
    ]
    kind, files = same(raw_tar(*members), tmp_path)
    assert kind == "files" and isinstance(files, dict) and len(files) > 700


def acl(*entries: tuple[int, int, int]) -> str:
    """Return a POSIX ACL of (tag, rights, id) entries in the form in which a tar stores it."""
    content = ACL_HEAD + b"".join(
        tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + owner.to_bytes(4, "little")
        for tag, rights, owner in entries
    )
    return content.decode("latin-1")


NOBODY = 0xFFFFFFFF


@pytest.mark.parametrize(
    "attributes",
    [
        {"user.a": "x", "user.b": "y" * 3000, "user.": "nameless", f"user.{'n' * 250}": "long"},
        {"security.capability": "\x01\0\0\x02\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0"},
        {"security.capability": "not one"},
        {
            "system.posix_acl_access": acl(
                (1, 7, NOBODY), (2, 5, 1000), (4, 1, NOBODY), (16, 5, NOBODY), (32, 0, NOBODY)
            )
        },
        {"system.posix_acl_access": acl((1, 6, NOBODY), (4, 4, NOBODY), (32, 0, NOBODY))},
        {
            "system.posix_acl_access": acl(
                (1, 6, NOBODY), (2, 4, 5), (4, 4, NOBODY), (32, 0, NOBODY)
            )
        },
        {"system.posix_acl_access": "not one"},
        {
            "user.overlay.opaque": "y",
            "trusted.overlay.opaque": "y",
            "security.selinux": "z",
            "user.ok": "1",
        },
    ],
)
@pytest.mark.parametrize("what", ["file", "directory", "link", "fifo"])
def test_extended_attributes_are_the_same_in_both_stores(
    tmp_path: Path, attributes: dict[str, str], what: str
) -> None:
    pax = {f"SCHILY.xattr.{name}": value for name, value in attributes.items()}
    kinds = {
        "file": LayerFile(b"x", pax=pax),
        "directory": directory(pax=pax),
        "link": replace(symlink("x"), pax=pax),
        "fifo": replace(LayerFile(kind=b"6"), pax=pax),
    }
    tar = raw_tar(("a", kinds[what]))
    try:
        expected = unpacked(tar, tmp_path / "unpacked")
    except Error as error:
        pytest.fail(f"unpacking ends with {error}")
    assert outcome([tar], tmp_path / "mounted") == expected


def test_more_attributes_than_an_inode_can_hold_are_refused(tmp_path: Path) -> None:
    # other file systems hold fewer: ext4 has a block of 4 KiB for attributes
    large = {f"SCHILY.xattr.user.{name}": name * 60_000 for name in "abcd"}
    with mounted(tmp_path / "four", [raw_tar(("f", LayerFile(pax=large)))]) as root:
        assert {
            n: len(os.getxattr(root / "f", n)) for n in os.listxattr(root / "f")
        } == dict.fromkeys([f"user.{name}" for name in "abcd"], 60_000)
    assert outcome(
        [raw_tar(("f", LayerFile(pax=large | {"SCHILY.xattr.user.e": "e" * 60_000})))],
        tmp_path / "five",
    ) == ("refused", None)


def test_a_hard_link_into_a_replaced_folder_is_refused(tmp_path: Path) -> None:
    assert same(raw_tar(("d/f", LayerFile(b"x")), ("d", hardlink("d/f"))), tmp_path)[0] == "refused"


def test_a_file_at_the_end_of_a_block_shows_no_padding(tmp_path: Path) -> None:
    # a tar pads each file to 512 bytes
    chance = random.Random(4)
    tar = layer(
        {
            f"f{size}": chance.randbytes(size)
            for size in (0, 1, 511, 512, 513, 4095, 4096, 4097, 70_000)
        }
    )
    padded = tar.replace(bytes(300), b"P" * 300)
    assert same(tar, tmp_path)[0] == "files"
    assert padded  # another tar: only the first one's bytes are read
    with mounted(tmp_path / "again", [tar]) as root:
        assert (root / "f513").read_bytes()[512:] == (root / "f513").read_bytes()[-1:]


# ---- layers over each other

STACKS = {
    "a whiteout": [BASE, raw_tar(("etc/.wh.shadow", LayerFile()), ("opt/.wh.old", LayerFile()))],
    "an opaque directory": [
        BASE,
        raw_tar(("opt", directory()), (f"opt/{OPAQUE}", LayerFile()), ("opt/new", LayerFile(b"n"))),
    ],
    "a whiteout before its name": [
        BASE,
        raw_tar(("opt/.wh.old", LayerFile()), ("opt/old/new", LayerFile(b"n"))),
    ],
    "a whiteout after its name": [
        BASE,
        raw_tar(
            ("opt/old", directory()), ("opt/old/new", LayerFile(b"n")), ("opt/.wh.old", LayerFile())
        ),
    ],
    "a whiteout beside a file": [
        BASE,
        raw_tar(("opt/old", LayerFile(b"a file")), ("opt/.wh.old", LayerFile())),
    ],
    "an opaque root": [BASE, raw_tar((OPAQUE, LayerFile()), ("only", LayerFile(b"x")))],
    "an opaque root with its own looks": [
        BASE,
        raw_tar((".", directory(0o700, uid=5)), (OPAQUE, LayerFile()), ("etc/x", LayerFile())),
    ],
    "undescribed directories": [
        BASE,
        raw_tar(("tmp/x", LayerFile(b"x")), ("opt/y/z", LayerFile(b"y"))),
        raw_tar(("opt/w", LayerFile())),
    ],
    "undescribed, below a whiteout": [
        BASE,
        raw_tar((".wh.opt", LayerFile())),
        raw_tar(("opt/new", LayerFile(b"n"))),
    ],
    "described twice": [
        BASE,
        raw_tar(("opt", directory(0o711, uid=3))),
        raw_tar(("opt/x", LayerFile())),
    ],
    "a file over a directory": [BASE, raw_tar(("opt", LayerFile(b"now a file")))],
    "a directory over a file": [BASE, raw_tar(("etc/passwd/new", LayerFile(b"n")))],
    "a link over a directory": [
        BASE,
        raw_tar(("opt", symlink("etc")), ("opt/through", LayerFile(b"x"))),
    ],
    "the root's looks": [raw_tar((".", directory(0o750, uid=9))), raw_tar(("x", LayerFile()))],
    "a fake whiteout": [BASE, raw_tar(("etc/passwd", LayerFile(kind=b"3", device=(0, 0))))],
    "one layer twice": [BASE, raw_tar(("opt/.wh.old", LayerFile())), BASE],
    "hard links, of which one is hidden": [
        raw_tar(("a", LayerFile(b"x")), ("b", hardlink("a")), ("c", hardlink("a"))),
        raw_tar((".wh.b", LayerFile())),
    ],
    "nothing at all": [layer({}), layer({})],
}


@pytest.mark.parametrize("case", STACKS)
def test_mounted_layers_equal_an_overlay_of_unpacked_layers(tmp_path: Path, case: str) -> None:
    assert_same_stack(tmp_path, STACKS[case])


def assert_same_stack(folder: Path, tars: Sequence[bytes]) -> None:
    (folder / "stack").mkdir()
    stack = Stack(folder / "stack")
    try:
        expected = facts_of(stack.mount(tars))
    finally:
        stack.unmount()
    with mounted(folder / "mounted", tars) as root:
        actual = facts_of(root)
    # overlayfs has the size of a layer's directory, and its own number of links
    assert actual == expected


def test_many_random_mounted_layers_equal_an_overlay_of_unpacked_layers(tmp_path: Path) -> None:
    chance = random.Random(6)
    for number in range(12):
        tars = []
        for _ in range(chance.randrange(2, 7)):
            files: list[tuple[str, LayerFile]] = []
            for _ in range(chance.randrange(1, 14)):
                place = "/".join(f"d{chance.randrange(2)}" for _ in range(chance.randrange(0, 3)))
                name = chance.choice(["f0", "f1", "d0", "d1"])
                path = f"{place}/{name}".lstrip("/")
                kind = chance.randrange(6)
                if kind == 0:
                    files.append((f"{place}/.wh.{name}".lstrip("/"), LayerFile()))
                elif kind == 1:
                    files.append((f"{place}/{OPAQUE}".lstrip("/"), LayerFile()))
                elif kind == 2:
                    files.append(
                        (path, directory(chance.choice([0o700, 0o755]), uid=chance.randrange(9)))
                    )
                else:
                    files.append(
                        (f"{path}x", LayerFile(chance.randbytes(5), uid=chance.randrange(9)))
                    )
            tars.append(raw_tar(*files))
        assert chain_ids([str(n) for n in range(len(tars))])
        (tmp_path / str(number)).mkdir()
        try:
            assert_same_stack(tmp_path / str(number), tars)
        except BadLayer:
            continue  # a file where another entry wants a folder: both refuse, see above


# ---- bounds


def test_more_entries_than_allowed_are_refused(tmp_path: Path) -> None:
    tar = layer({f"f{number}": "" for number in range(60)})
    with (
        pytest.raises(ResourceExhausted, match="more than 50 entries"),
        mounted(tmp_path, [tar], UnpackLimits(entries=50)),
    ):
        pass


def test_undescribed_folders_count_as_entries(tmp_path: Path) -> None:
    tar = raw_tar(("/".join("abcdefghij" * 10), LayerFile()))
    with (
        pytest.raises(ResourceExhausted, match="more than 50 entries"),
        mounted(tmp_path, [tar], UnpackLimits(entries=50)),
    ):
        pass


def test_a_huge_sparse_file_takes_no_disk_space(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(8 << 30)
        file.seek(5 << 30)
        file.write(b"data")
    tar = subprocess.run(
        ["tar", "-C", tmp_path, "--sparse", "-c", "huge"], check=True, capture_output=True
    ).stdout
    with mounted(tmp_path / "mounted", [tar]) as root:
        assert (root / "huge").stat().st_size == 8 << 30
        with open(root / "huge", "rb") as file:
            file.seek((5 << 30) - 2)
            assert file.read(8) == b"\0\0data\0\0"
    assert (tmp_path / "mounted" / "index").stat().st_blocks * 512 < 1 << 20  # a list of its chunks


def test_a_tar_without_end_blocks_is_read(tmp_path: Path) -> None:
    """A tar that is cut after its last file has the same files unpacked and mounted."""
    for blob in (header() + b"x".ljust(512, b"\0"), header() + b"x"):
        (tmp_path / str(len(blob))).mkdir()
        same(blob, tmp_path / str(len(blob)))


def test_device_nodes_keep_every_number(tmp_path: Path) -> None:
    numbers = [(0, 1), (1, 0), (255, 255), (256, 256), (4095, (1 << 20) - 1)]
    members = [
        (f"{kind}{n}", LayerFile(kind=kind.encode(), device=number))
        for n, number in enumerate(numbers)
        for kind in "34"
    ]
    kind, files = same(raw_tar(*members), tmp_path)
    assert kind == "files" and isinstance(files, dict)
    assert {f.device for f in files.values() if f.kind in "bc"} == {os.makedev(*n) for n in numbers}
    assert stat.S_ISCHR(0o020000)
