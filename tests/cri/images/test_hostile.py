"""Tests layers that try to write outside their own folder: each is refused with a reason, or
unpacked without any change outside the folder."""

from __future__ import annotations

import os
import random
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.images.archives.build import LayerFile, directory, symlink
from cri_server.images.layers.inflate import BadLayer, UnpackLimits
from pyrunc.errors import Error, ResourceExhausted
from pyrunc.kernel.tree import remove_tree
from tests.cri.images.conftest import unpack_bytes
from tests.cri.images.test_unpack import raw_tar
from tests.cri.images.trees import names, snapshot

HARD = tarfile.LNKTYPE
OPAQUE = ".wh..wh..opq"


def hardlink(target: str) -> LayerFile:
    return LayerFile(kind=HARD, link=target)


def fifo() -> LayerFile:
    return LayerFile(kind=tarfile.FIFOTYPE)


def device(major: int, minor: int, kind: bytes = tarfile.CHRTYPE) -> LayerFile:
    return LayerFile(kind=kind, device=(major, minor))


def xattr(name: str, value: str = "y") -> LayerFile:
    return directory(pax={f"SCHILY.xattr.{name}": value})


class Jail:
    """A layer's folder, and a canary beside and above it: a folder with files, links and a device
    that must stay unchanged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layer = root / "jail" / "layer"
        self.layer.mkdir(parents=True)
        canary = root / "canary"
        canary.mkdir()
        (canary / "file").write_text("unharmed")
        (canary / "folder").mkdir()
        (canary / "folder" / "inside").write_text("unharmed")
        (canary / "link").symlink_to("file")
        (root / "jail" / "beside").write_text("unharmed")
        self._before = self._outside()

    def unpack(self, blob: bytes) -> Path:
        """Unpack a layer; return the folder of its files. Assert that this takes less than 30 s and
        changes nothing outside the layer's folder."""
        started = time.monotonic()
        try:
            unpack_bytes(blob, self.layer, UnpackLimits(size_bytes=64 << 20, entries=50_000))
        finally:
            assert time.monotonic() - started < 30
            assert self._outside() == self._before, "something outside the layer changed"
        return self.layer / "tree"

    def clean(self) -> None:
        fd = os.open(self.layer.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            remove_tree(fd, "layer")
        finally:
            os.close(fd)
        self.layer.mkdir()

    def _outside(self) -> object:
        return {
            name: facts
            for name, facts in snapshot(self.root).items()
            if not name.startswith(b"jail/layer") and name != b"jail"
        }


@pytest.fixture
def jail(tmp_path: Path) -> Jail:
    return Jail(tmp_path)


@pytest.fixture(scope="module")
def shared_jail(tmp_path_factory: pytest.TempPathFactory) -> Jail:
    return Jail(tmp_path_factory.mktemp("shared"))


REFUSED: dict[str, list[tuple[str, LayerFile]]] = {
    "up": [("../canary/file", LayerFile(b"x"))],
    "far up": [("../" * 20 + "etc/pyrunc-was-here", LayerFile(b"x"))],
    "up in the middle": [("a/../../canary/file", LayerFile(b"x"))],
    "up at the end": [("a", directory()), ("a/..", directory(0o777))],
    "only up": [("..", directory(0o777))],
    "absolute and up": [("/../../canary/file", LayerFile(b"x"))],
    "the root as a link": [(".", symlink("/tmp"))],
    "the root as a file": [(".", LayerFile(b"x"))],
    "an empty name": [("", LayerFile(b"x"))],
    "a hard link up": [("a", hardlink("../../canary/file"))],
    "a hard link to a host file": [("a", hardlink("/etc/passwd"))],
    "a hard link to nothing": [("a", hardlink("b")), ("b", LayerFile(b"later"))],
    "a hard link to a directory": [("d", directory()), ("a", hardlink("d"))],
    "a hard link to the root": [("a", hardlink("."))],
    "a hard link to a whiteout": [(".wh.b", LayerFile()), ("a", hardlink("b"))],
    "a hard link to a whiteout's name": [(".wh.b", LayerFile()), ("a", hardlink(".wh.b"))],
    "a hard link through a link out": [("l", symlink("/../../canary")), ("a", hardlink("l/file"))],
    "a file as a parent": [("a", LayerFile(b"x")), ("a/b", LayerFile(b"y"))],
    "a device as a parent": [("a", device(1, 3)), ("a/b", LayerFile(b"y"))],
    "a fifo as a parent": [("a", fifo()), ("a/b", LayerFile(b"y"))],
    "a fake whiteout as a parent": [("a", device(0, 0)), ("a/b", LayerFile(b"y"))],
    "links in a circle": [("a", symlink("b")), ("b", symlink("a")), ("a/c", LayerFile(b"x"))],
    "a link to itself": [("a", symlink("a")), ("a/c", LayerFile(b"x"))],
    "a link to nothing at all": [("a", symlink("")), ("b", LayerFile())],
    "a whiteout of nothing": [(".wh.", LayerFile())],
    "a whiteout of the folder": [("a/.wh..", LayerFile())],
    "a whiteout of the parent directory": [(".wh...", LayerFile())],
    "a whiteout as a parent": [("a/.wh.b/c", LayerFile(b"x"))],
    "a name of 256 bytes": [("n" * 256, LayerFile(b"x"))],
    "a path of 5000 bytes": [("/".join(["d" * 200] * 25), LayerFile(b"x"))],
    "a link of 5000 bytes": [("a", symlink("x" * 5000))],
    "a NUL in a name": [("name", LayerFile(b"x", pax={"path": "a\0b"}))],
    "a NUL in a link": [
        ("name", LayerFile(kind=tarfile.SYMTYPE, link="x", pax={"linkpath": "a\0b"}))
    ],
    "up by PAX": [("innocent", LayerFile(b"x", pax={"path": "../../canary/file"}))],
    "up by PAX for sparse files": [
        ("innocent", LayerFile(b"x", pax={"GNU.sparse.name": "../canary/file"}))
    ],
    "the owner 2^32 - 1, which chown(2) leaves as it is": [
        ("a", LayerFile(b"x", pax={"uid": str(2**32 - 1)}))
    ],
    "an owner out of range": [("a", LayerFile(b"x", pax={"gid": str(2**40)}))],
    "a negative size": [("a", LayerFile(b"x", pax={"size": "-5"}))],
    "a size that is no number": [("a", LayerFile(b"x", pax={"size": "1e9"}))],
    "a size beyond everything": [("a", LayerFile(b"x", pax={"size": "9" * 30}))],
    "a size beyond the archive": [("a", LayerFile(b"x", pax={"size": "40000000"}))],
    "a time that is no number": [("a", LayerFile(b"x", pax={"mtime": "nan"}))],
    "a sparse map that overlaps": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "0,1,0,1", "GNU.sparse.size": "9"}))
    ],
    "a sparse map that runs backwards": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "5,1,2,1", "GNU.sparse.size": "9"}))
    ],
    "a sparse map that is odd": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "0,1,2", "GNU.sparse.size": "9"}))
    ],
    "a sparse map out of the file": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "8,2", "GNU.sparse.size": "9"}))
    ],
    "a sparse map for other data": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "0,1", "GNU.sparse.size": "9"}))
    ],
    "a sparse map that is text": [
        ("a", LayerFile(b"xx", pax={"GNU.sparse.map": "a,b", "GNU.sparse.size": "9"}))
    ],
    "a sparse map without a size": [("a", LayerFile(b"x", pax={"GNU.sparse.map": "0,1"}))],
    "a sparse list without a size": [
        ("a", LayerFile(b"x" * 512, pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}))
    ],
    "an attribute's name with a NUL": [("a", LayerFile(pax={"SCHILY.xattr.user.a\0b": "x"}))],
    "an attribute of 100 kB": [("a", LayerFile(pax={"SCHILY.xattr.user.a": "x" * 100_000}))],
    "a file that takes its own folder's place": [
        ("a", directory()),
        ("a/b", LayerFile(b"x")),
        ("a", hardlink("a/b")),
    ],
    "a sparse list that is text": [
        (
            "a",
            LayerFile(
                b"x" * 512,
                pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
            ),
        )
    ],
    "a sparse list without end": [
        (
            "a",
            LayerFile(
                b"9999999\n" * 64,
                pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"},
            ),
        )
    ],
}

CONTAINED: dict[str, tuple[list[tuple[str, LayerFile]], set[str]]] = {
    "absolute names": ([("/etc/pyrunc-was-here", LayerFile(b"x"))], {"etc", "etc/pyrunc-was-here"}),
    "a link out, written through": (
        [("l", symlink("/etc")), ("l/pyrunc-was-here", LayerFile(b"x"))],
        {"l", "etc", "etc/pyrunc-was-here"},
    ),
    "a link up, written through": (
        [("l", symlink("../../canary")), ("l/file", LayerFile(b"x"))],
        {"l", "canary", "canary/file"},
    ),
    "a link over a link": (
        [("a", symlink("..")), ("b", symlink("a/a/a")), ("b/canary/file", LayerFile(b"x"))],
        {"a", "b", "canary", "canary/file"},
    ),
    "a link that is replaced by a file": (
        [("l", symlink("../../canary/file")), ("l", LayerFile(b"x"))],
        {"l"},
    ),
    "a link that is replaced by a folder": (
        [("l", symlink("../../canary")), ("l", directory()), ("l/file", LayerFile(b"x"))],
        {"l", "l/file"},
    ),
    "a folder that becomes a link between two files": (
        [
            ("d", directory()),
            ("d/a", LayerFile()),
            ("d", symlink("../../canary")),
            ("d/file", LayerFile(b"x")),
        ],
        {"d", "canary", "canary/file"},
    ),
    "attributes through a link": (
        [("l", symlink("../../canary/file")), ("l", LayerFile(b"", 0o777, uid=5))],
        {"l"},
    ),
    "a link to magic": (
        [("l", symlink("/proc/self/root/etc")), ("l/x", LayerFile(b"x"))],
        {"l", "proc", "proc/self", "proc/self/root", "proc/self/root/etc", "proc/self/root/etc/x"},
    ),
    "a link to itself by hard link": ([("a", LayerFile(b"x")), ("a", hardlink("a"))], {"a"}),
    "a hard link to a link": ([("l", symlink("/etc/passwd")), ("a", hardlink("l"))], {"l", "a"}),
    "a whiteout of what leads out": (
        [("l", symlink("../../canary")), ("l/.wh.file", LayerFile())],
        {"l", "canary", "canary/file"},
    ),
    "an opaque link": (
        [("l", symlink("../../canary")), (f"l/{OPAQUE}", LayerFile())],
        {"l", "canary"},
    ),
    "an opaque root": ([(OPAQUE, LayerFile()), ("a", LayerFile())], {"a"}),
    "notes of aufs": (
        [(".wh..wh.plnk/1.2", LayerFile(b"x")), (".wh..wh.aufs", LayerFile()), ("a", LayerFile())],
        {"a"},
    ),
    "a whiteout twice": ([(".wh.a", LayerFile()), (".wh.a", LayerFile())], {"a"}),
    "a whiteout that is a folder": ([(".wh.a", directory()), ("b", LayerFile())], {"a", "b"}),
    "a whiteout with content": (
        [(".wh.a", LayerFile(b"content " * 200)), ("b", LayerFile(b"y"))],
        {"a", "b"},
    ),
    "case tricks": (
        [("Link", symlink("../../canary")), ("LINK/file", LayerFile(b"x"))],
        {"Link", "LINK", "LINK/file"},
    ),
    "dots and slashes": (
        [(".//a/./b//", directory()), ("././a/b/c", LayerFile(b"x"))],
        {"a", "a/b", "a/b/c"},
    ),
    "a name that looks like up": (
        [("...", LayerFile(b"x")), ("..a/b", LayerFile(b"y"))],
        {"...", "..a", "..a/b"},
    ),
    "a name with a newline": ([("a\nb", LayerFile(b"x"))], {"a\nb"}),
    "a device": ([("mem", device(1, 1)), ("sda", device(8, 0, tarfile.BLKTYPE))], {"mem", "sda"}),
    "a time before there was time": (
        [("a", LayerFile(b"x", pax={"mtime": "-99999999999.5"}))],
        {"a"},
    ),
    "a time after all time": ([("a", LayerFile(b"x", pax={"mtime": "9999999999999999.9"}))], {"a"}),
    "five hundred levels": (
        [("/".join(["d"] * 500) + "/f", LayerFile(b"x"))],
        {"/".join(["d"] * n) for n in range(1, 501)} | {"/".join(["d"] * 500) + "/f"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_layers_are_refused(jail: Jail, case: str) -> None:
    with pytest.raises((BadLayer, ResourceExhausted)) as caught:
        jail.unpack(raw_tar(*REFUSED[case]))
    assert caught.value.message and len(caught.value.message) < 600


@pytest.mark.parametrize("case", CONTAINED)
def test_hostile_layers_are_contained(jail: Jail, case: str) -> None:
    members, expected = CONTAINED[case]
    assert names(jail.unpack(raw_tar(*members))) == expected


def test_overlayfs_attributes_of_a_layer_are_dropped(jail: Jail) -> None:
    """Attributes trusted.*, *.overlay.*, security.selinux and security.ima are dropped; other
    user.* and security.capability stay."""
    orders = [
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "trusted.overlay.metacopy",
        "trusted.x",
        "user.overlay.opaque",
        "security.selinux",
        "security.ima",
    ]
    tree = jail.unpack(
        raw_tar(*[(f"d{n}", xattr(name, "/etc")) for n, name in enumerate([*orders, "user.ok"])])
    )
    xattrs = {name: facts.xattrs for name, facts in snapshot(tree).items() if facts.xattrs}
    assert xattrs == {b"d7": frozenset({("user.ok", b"/etc")})}


def test_setuid_and_sticky_bits_stay_and_unknown_mode_bits_are_dropped(jail: Jail) -> None:
    tree = jail.unpack(
        raw_tar(("a", LayerFile(b"x", 0o6755, uid=3, gid=4)), ("b", LayerFile(b"x", 0o7777777)))
    )
    assert stat.S_IMODE((tree / "a").stat().st_mode) == 0o6755
    assert stat.S_IMODE((tree / "b").stat().st_mode) == 0o7777


# ---- headers that no library writes


def header(
    name: bytes = b"a", *, kind: bytes = b"0", size: bytes = b"00000000001\0",
    mode: bytes = b"0000644\0", link: bytes = b"", uid: bytes = b"0000000\0",
    mtime: bytes = b"00000000000\0", magic: bytes = b"ustar\x0000",
    devices: bytes = b"0000000\x000000000\0", rest: bytes = b"", checksum: bytes | None = None,
) -> bytes:  # fmt: skip
    """Return a tar header of these raw fields, with the right checksum unless `checksum` is set."""
    block = bytearray(
        name.ljust(100, b"\0")
        + mode
        + uid
        + uid
        + size
        + mtime
        + b" " * 8
        + kind
        + link.ljust(100, b"\0")
        + magic
        + bytes(64)
        + devices
        + rest.ljust(167, b"\0")
    )
    assert len(block) == 512
    block[148:156] = checksum if checksum is not None else b"%06o\0 " % sum(block)
    return bytes(block)


DATA = b"x".ljust(512, b"\0")
END = bytes(1024)
PAX_DATA = b"11 path=ab\n"
RAW: dict[str, bytes] = {
    "a wrong checksum": header(checksum=b"000000\0 ") + DATA + END,
    "a wrong checksum later": header(b"ok")
    + DATA
    + header(b"bad", checksum=b"000000\0 ")
    + DATA
    + END,
    "a checksum of letters": header(checksum=b"abcdef\0 ") + DATA + END,
    "a size of letters": header(size=b"hello worl\0 ") + DATA + END,
    "a negative size": header(size=b"\xff" * 12) + DATA + END,
    "a size of 2^94": header(size=b"\xbf" + b"\xff" * 11) + DATA + END,
    "a size of 8 GiB without data": header(size=b"77777777777\0") + DATA,
    "a mode of letters": header(mode=b"rwxr-xr-") + DATA + END,
    "a negative owner": header(uid=b"\xff" * 8) + DATA + END,
    "an owner of 2^40": header(uid=b"\x80\x00\x01" + bytes(5)) + DATA + END,
    "an unknown type": header(kind=b"Q") + DATA + END,
    "a multi-volume part": header(kind=b"M") + DATA + END,
    "cut in the header": header()[:300],
    "cut in the data": header(size=b"00000002000\0") + DATA,
    "cut before the data": header(),
    "a long name without a file": header(b"././@LongLink", kind=b"L") + DATA + END,
    "a long name of 1 GiB": header(b"././@LongLink", kind=b"L", size=b"10000000000\0") + DATA,
    "a PAX header of 2 MiB": header(kind=b"x", size=b"%011o\0" % (2 << 20)) + bytes(2 << 20) + END,
    "a PAX header without a file": header(kind=b"x", size=b"%011o\0" % 11)
    + PAX_DATA.ljust(512, b"\0")
    + END,
    "a PAX record too long": header(kind=b"x", size=b"%011o\0" % 11)
    + b"99 path=ab\n".ljust(512, b"\0")
    + header()
    + DATA
    + END,
    "a PAX record too short": header(kind=b"x", size=b"%011o\0" % 11)
    + b"3 path=abc\n".ljust(512, b"\0")
    + header()
    + DATA
    + END,
    "a PAX record of nothing": header(kind=b"x", size=b"%011o\0" % 4)
    + b"0 =\n".ljust(512, b"\0")
    + header()
    + DATA
    + END,
    "a PAX record without =": header(kind=b"x", size=b"%011o\0" % 9)
    + b"9 path-a\n".ljust(512, b"\0")
    + header()
    + DATA
    + END,
    "a PAX record without length": header(kind=b"x", size=b"%011o\0" % 9)
    + b"path=abc\n".ljust(512, b"\0")
    + header()
    + DATA
    + END,
    "a device number of 2^40": header(
        kind=b"3", size=b"0" * 11 + b"\0", devices=b"\x80\x00\x01" + bytes(5) + b"0000001\0"
    )
    + END,
    "a sparse header out of range": header(
        kind=b"S",
        magic=b"ustar  \0",
        rest=bytes(41) + b"77777777777\x0077777777777\0" + bytes(72) + b"\0" + b"00000000001\0",
    )
    + DATA
    + END,
    "a sparse header without end": header(
        kind=b"S", magic=b"ustar  \0", rest=bytes(137) + b"\1" + b"00000000001\0"
    )
    + (bytes(504) + b"\1" + bytes(7)) * 3,
    "text": b"this is not a tar archive, it is just text\n" * 30,
    "noise": random.Random(3).randbytes(5000),
    "half a block": b"x" * 100,
}


@pytest.mark.parametrize("case", RAW)
def test_raw_headers_are_refused(jail: Jail, case: str) -> None:
    with pytest.raises((BadLayer, ResourceExhausted)):
        jail.unpack(RAW[case])


@pytest.mark.parametrize(
    ("blob", "expected"),
    [
        (b"", set()),
        (END, set()),
        (header() + DATA, {"a"}),
        (header() + DATA + bytes(512), {"a"}),
        (header() + DATA + END + b"garbage after the end" * 100, {"a"}),
        (header() + DATA + END + header(b"../../canary/file") + DATA, {"a"}),
        (header(kind=b"7") + DATA + END, {"a"}),
        (header(b"old/", magic=bytes(8), size=b"0" * 11 + b"\0") + END, {"old"}),
        (header(b"label", kind=b"V", size=b"0" * 11 + b"\0") + header() + DATA + END, {"a"}),
        (
            header(kind=b"g", size=b"%011o\0" % 11)
            + PAX_DATA.ljust(512, b"\0")
            + header()
            + DATA
            + END,
            {"a"},
        ),
    ],
    ids=[
        "nothing",
        "only an end",
        "no end",
        "half an end",
        "garbage",
        "entries after the end",
        "contiguous",
        "v7 folder",
        "label",
        "global",
    ],
)
def test_valid_raw_archives_are_accepted(jail: Jail, blob: bytes, expected: set[str]) -> None:
    assert names(jail.unpack(blob)) == expected


def test_many_pax_records_do_not_take_long(jail: Jail) -> None:
    records = b"6 a=b\n" * 170_000
    pax = header(kind=b"x", size=b"%011o\0" % len(records)) + records + bytes(-len(records) % 512)
    assert names(jail.unpack(pax + header() + DATA + END)) == {"a"}


@pytest.fixture(autouse=True)
def nothing_was_left_on_the_host() -> Iterator[None]:
    yield
    assert not Path("/etc/pyrunc-was-here").exists()


def test_bad_layers_raise_our_own_errors() -> None:
    assert issubclass(BadLayer, Error)
