"""Tests every mount option of the specification, read back from the container's mountinfo: on a
bind, on a new filesystem, on a tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyrunc.errors import InvalidSpec, KernelError
from pyrunc.kernel import mount as km
from pyrunc.kernel import namespace
from tests.kernel.box import Box, mounts

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
MAPS = [{"containerID": 0, "hostID": 100000, "size": 65536}]
# option -> what it adds to plain mount options, and what it takes from full ones
PLAIN = {"rw", "relatime"}
FULL = {"ro", "nosuid", "nodev", "noexec", "noatime", "nodiratime", "nosymfollow"}
SET: dict[str, tuple[set[str], set[str]]] = {
    "ro": ({"ro"}, {"rw"}),
    "nosuid": ({"nosuid"}, set()),
    "nodev": ({"nodev"}, set()),
    "noexec": ({"noexec"}, set()),
    "nosymfollow": ({"nosymfollow"}, set()),
    "noatime": ({"noatime"}, {"relatime"}),
    "nodiratime": ({"nodiratime"}, set()),
    "strictatime": (set(), {"relatime"}),
    "norelatime": (set(), {"relatime"}),
    "relatime": (set(), set()),
}
CLEAR: dict[str, tuple[set[str], set[str]]] = {
    "rw": ({"rw"}, {"ro"}),
    "suid": (set(), {"nosuid"}),
    "dev": (set(), {"nodev"}),
    "exec": (set(), {"noexec"}),
    "symfollow": (set(), {"nosymfollow"}),
    "atime": ({"relatime"}, {"noatime"}),
    "nostrictatime": ({"relatime"}, {"noatime"}),
    "diratime": (set(), {"nodiratime"}),
}


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a folder with a mount in it, both with these MOUNT_ATTR_* flags, in a mount namespace
    of this test alone."""
    own, folder = namespace.open_own("mnt"), Path.cwd()
    namespace.unshare(CLONE_NEWNS)
    km.mount(None, "/", None, MS_REC | MS_PRIVATE)

    def make(attributes: int) -> Path:
        outer = tmp_path / "outer"
        outer.mkdir()
        for place in (outer, outer / "inner"):
            mount = km.open_mount("tmpfs", [("mode", "755")], attributes=attributes & ~1)
            km.move_mount(mount, place)
            (place / "file").touch()
            if place is outer:
                (outer / "inner").mkdir()
            os.close(mount)
        for place in (outer, outer / "inner"):
            km.mount_setattr(-100, place, attr_set=attributes & 1)
        return outer

    yield make
    namespace.setns(own, CLONE_NEWNS)
    os.chdir(folder)
    os.close(own)


def options_of(box: Box, place: str) -> set[str]:
    return set(mounts(box.run("cat /proc/self/mountinfo"))[place][0].split(","))


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("option", SET)
def test_an_option_is_set_on_a_tree(
    box: Box, tree: Callable[[int], Path], option: str, recursive: bool
) -> None:
    box.bind(tree(0), "/t", "rbind", "rprivate", "r" * recursive + option)
    adds, takes = SET[option]
    assert options_of(box, "/t") == (PLAIN - takes) | adds
    assert options_of(box, "/t/inner") == ((PLAIN - takes) | adds if recursive else PLAIN)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("option", CLEAR)
def test_recursive_options_clear_flags_of_a_tree(
    box: Box, tree: Callable[[int], Path], option: str, recursive: bool
) -> None:
    box.bind(
        tree(1 | 2 | 4 | 8 | 0x10 | 0x80 | 0x200000),
        "/t",
        "rbind",
        "rprivate",
        "r" * recursive + option,
    )
    adds, takes = CLEAR[option]
    assert options_of(box, "/t") == (FULL - takes) | adds
    assert options_of(box, "/t/inner") == ((FULL - takes) | adds if recursive else FULL)


@pytest.mark.parametrize("option", SET)
def test_an_option_is_set_on_a_new_filesystem(box: Box, option: str) -> None:
    box.add_mount("/t", "tmpfs", option, kind="tmpfs")
    adds, takes = SET[option]
    assert options_of(box, "/t") == (PLAIN - takes) | adds


def test_the_last_of_two_options_wins_and_options_without_effect_are_accepted(
    box: Box, tmp_path: Path
) -> None:
    box.add_mount("/t", "tmpfs", "ro", "noexec", "rw", "exec", "defaults", "async", "nomand",
        "noiversion", "nolazytime",
                  "silent", "loud", "size=64k", kind="tmpfs")  # fmt: skip
    mounted = mounts(
        box.run(
            "cat /proc/self/mountinfo; dd if=/dev/zero of=/t/x bs=1k count=100 2>/dev/null; true"
        )
    )
    assert mounted["/t"][0] == "rw,relatime"


def test_remount_changes_an_existing_mount(box: Box, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").touch()
    box.bind(tmp_path / "data", "/t", "rbind", "rprivate", "suid", "dev", "relatime")
    box.add_mount("/t", "", "remount", "bind", "ro", "noexec", kind="")
    box.add_mount("/dev/shm", "shm", "remount", "ro", "exec", kind="tmpfs")
    mounted = mounts(box.run("test -e /t/file; cat /proc/self/mountinfo"))
    assert mounted["/t"][0] == "ro,noexec,relatime"
    assert mounted["/dev/shm"][0] == "ro,nosuid,nodev,relatime"
    for options, words in ((["size=1k"], "own flags only"), (["rro"], "own flags only")):
        box.config["mounts"][-1]["options"] = ["remount", *options]
        with pytest.raises(InvalidSpec, match=words):
            box.run("true")


def test_remount_without_a_mount_is_an_error(box: Box) -> None:
    box.add_mount("/tmp", "", "remount", "ro", kind="")
    with pytest.raises(KernelError, match="remount '/tmp'"):
        box.run("true")


@pytest.mark.parametrize(
    ("option", "listed"), [("sync", "sync"), ("dirsync", "dirsync"), ("lazytime", "lazytime")]
)
def test_flags_of_the_superblock_are_set(box: Box, option: str, listed: str) -> None:
    box.add_mount("/t", "tmpfs", option, kind="tmpfs")
    (line,) = [row for row in box.run("cat /proc/self/mountinfo").splitlines() if " /t " in row]
    assert listed in line.partition(" - ")[2].split()[2].split(",")


def test_a_bind_in_a_user_namespace_keeps_unnamed_options(
    box: Box, tree: Callable[[int], Path]
) -> None:
    box.linux["namespaces"].append({"type": "user"})
    box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
    box.bind(tree(2 | 4 | 8), "/t", "rbind", "rprivate", "ro")
    assert options_of(box, "/t") == {"ro", "nosuid", "nodev", "noexec", "relatime"}


@pytest.mark.parametrize("option", ["idmap", "ridmap"])
@pytest.mark.parametrize("maps", ["own", "the container's", "a joined namespace's"])
def test_a_mapped_tree_has_mapped_owners(
    box: Box, tree: Callable[[int], Path], option: str, maps: str
) -> None:
    from pyrunc.compile.idmaps import open_user_namespace
    from pyrunc.spec.model import IdMap

    source = tree(0)
    for place in (source, source / "inner"):
        os.chown(place / "file", 5, 6)
    box.bind(source, "/t", "rbind", "rprivate", option)
    joined = -1
    if maps == "own":
        box.config["mounts"][-1].update(uidMappings=MAPS, gidMappings=MAPS)
        outer, inner = "100005:100006", "5:6"
    else:
        box.linux["namespaces"].append({"type": "user"})
        outer, inner = "5:6", "65534:65534"
        if maps == "the container's":
            box.linux["uidMappings"] = box.linux["gidMappings"] = MAPS
        else:
            ids = (IdMap(0, 200000, 1000),)
            joined = open_user_namespace(ids, ids)
            box.linux["namespaces"][-1]["path"] = f"/proc/{os.getpid()}/fd/{joined}"
    try:
        text = box.run("stat -c %u:%g /t/file /t/inner/file").split()
    finally:
        if joined >= 0:
            os.close(joined)
    assert text == [outer, outer if option == "ridmap" else inner]


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        ({"options": ["bind", "idmap"]}, "idmap needs mappings or a user namespace"),
        ({"options": ["bind"], "uidMappings": MAPS}, "needs both uidMappings and gidMappings"),
        (
            {"options": ["idmap"], "type": "tmpfs", "uidMappings": MAPS, "gidMappings": MAPS},
            "only bind mounts",
        ),
    ],
)
def test_impossible_maps_of_a_mount_are_refused(
    box: Box, mount: dict[str, object], words: str
) -> None:
    box.config["mounts"].append({"destination": "/t", "source": "/tmp", **mount})
    with pytest.raises(InvalidSpec, match=words):
        box.request("true")


def test_mapping_a_filesystem_without_idmapped_mounts_is_an_error(box: Box) -> None:
    box.bind(Path("/proc/sys"), "/t", "bind", "idmap")
    box.config["mounts"][-1].update(uidMappings=MAPS, gidMappings=MAPS)
    with pytest.raises(KernelError, match="may not support idmapped mounts"):
        box.run("true")
