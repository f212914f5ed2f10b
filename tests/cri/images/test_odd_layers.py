"""Tests that unusual layers of real builders can be unpacked and mounted (EROFS)."""

from __future__ import annotations

import gzip
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from cri_server.images.archives.build import LayerFile, directory, symlink
from cri_server.images.layers import walk_budget
from cri_server.images.layers.inflate import BadLayer, TarStream
from tests.cri.images.conftest import unpack_bytes
from tests.cri.images.indexes import write_index
from tests.cri.images.test_erofs import same
from tests.cri.images.test_hostile import OPAQUE, device, fifo, hardlink, header
from tests.cri.images.test_unpack import raw_tar

Members = list[tuple[str, LayerFile]]
Take = Callable[[bytes], None]


@pytest.fixture(params=["unpacked", "mounted"])
def take(request: pytest.FixtureRequest, tmp_path: Path) -> Take:
    """Return a function that unpacks a layer's tar, or that writes its EROFS index."""
    numbers = itertools.count()

    def run(tar: bytes) -> None:
        folder = tmp_path / f"taken-{next(numbers)}"
        folder.mkdir()
        if request.param == "unpacked":
            unpack_bytes(tar, folder)
        else:
            write_index(folder, [tar])

    return run


def test_names_of_real_layers_need_fewer_steps_than_the_limit(
    take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolving all paths of a layer takes less than a quarter of the permitted steps."""
    monkeypatch.setattr(
        walk_budget.WalkBudget.__init__, "__defaults__", (200, walk_budget.STEPS_PER_ENTRY // 4, 0)
    )
    take(
        raw_tar(
            ("usr/lib/x86_64-linux-gnu", directory()),
            ("lib", symlink("usr/lib")),
            # through a link; below folders without entries; nested deep
            *((f"lib/x86_64-linux-gnu/lib{n}.so", LayerFile()) for n in range(300)),
            *(
                (f"app/classes/com/company/part{n // 9}/impl/C{n}.class", LayerFile())
                for n in range(600)
            ),
            *(
                (f"srv/{'node_modules/p/' * depth}lib/{n}.js", LayerFile())
                for depth in range(1, 9)
                for n in range(12)
            ),
        )
    )


def whole(*members: tuple[str, LayerFile]) -> bytes:
    return raw_tar(*members)


def without_end(*members: tuple[str, LayerFile]) -> bytes:
    """Return a tar of these members that ends without zero blocks."""
    data = raw_tar(*members)
    while data.endswith(bytes(512)):
        data = data[:-512]
    return data


FILE = LayerFile(b"content")
GLOBAL = header(b"pax_global_header", kind=b"g", size=b"%011o\0" % 13) + b"13 comment=x\n".ljust(
    512, b"\0"
)
OLD = header(b"old/", kind=b"\0", size=b"00000000000\0", magic=bytes(8))
TYPED = header(b"typed", size=b"00000000000\0", mode=b"0100755\0")
LAYERS: dict[str, tuple[bytes, set[str]]] = {
    "kaniko: the root as a hard link to itself": (
        whole(("/", hardlink(".")), ("/app/f", FILE)),
        {"app", "app/f"},
    ),
    "kaniko: a folder after what is in it": (
        whole(("app/f", FILE), ("app/", directory(0o700)), ("/", directory())),
        {"app", "app/f"},
    ),
    "kaniko: a whiteout where nothing describes the folder": (
        whole(("var/cache/.wh.apt", LayerFile())),
        {"var", "var/cache"},
    ),
    "BuildKit: an opaque folder is marked behind its content": (
        whole(("opt", directory()), ("opt/f", FILE), (f"opt/{OPAQUE}", LayerFile())),
        {"opt", "opt/f"},
    ),
    "BuildKit: parts of a second": (
        whole(("f", LayerFile(b"x", pax={"mtime": "1700000000.123456789"}))),
        {"f"},
    ),
    "Bazel: no folder is described": (
        without_end(("./app/lib/f", FILE)),
        {"app", "app/lib", "app/lib/f"},
    ),
    "Bazel: the root and its folders again and again": (
        whole(
            ("./", directory()), ("./a/", directory()), ("./", directory()), ("./a/", directory())
        ),
        {"a"},
    ),
    "Bazel: bsdtar's own records": (
        whole(
            (
                "f",
                LayerFile(
                    b"x", pax={"LIBARCHIVE.creationtime": "1", "LIBARCHIVE.xattr.user.a": "eA"}
                ),
            )
        ),
        {"f"},
    ),
    "Bazel: a mode with the type in it": (TYPED + bytes(1024), {"typed"}),
    "Jib: absolute names": (
        whole(("/app/", directory()), ("/app/classes/C.class", LayerFile(b"x", mtime=1))),
        {"app", "app/classes", "app/classes/C.class"},
    ),
    "ko: folders that cannot be written to": (
        whole(
            ("ko-app", directory(0o555)),
            ("ko-app/main", LayerFile(b"x", 0o555)),
            ("kodata", symlink("/ko-app")),
        ),
        {"ko-app", "ko-app/main", "kodata"},
    ),
    "Buildah: overlayfs' own form of a whiteout": (
        whole(("gone", device(0, 0)), ("f", FILE)),
        {"f"},
    ),
    "Nix: read-only folders and hard links between packages": (
        whole(
            ("nix/store", directory(0o555)),
            ("nix/store/a-1", directory(0o555)),
            ("nix/store/a-1/f", LayerFile(b"x", 0o444, mtime=1)),
            ("nix/store/b-1", directory(0o555)),
            ("nix/store/b-1/f", hardlink("nix/store/a-1/f")),
            ("bin", symlink("/nix/store/b-1")),
        ),
        {
            "nix",
            "nix/store",
            "nix/store/a-1",
            "nix/store/a-1/f",
            "nix/store/b-1",
            "nix/store/b-1/f",
            "bin",
        },
    ),
    "Docker on aufs: notes": (
        whole(
            (".wh..wh.aufs", LayerFile()),
            (".wh..wh.orph", directory()),
            (".wh..wh.plnk", directory()),
            ("f", FILE),
        ),
        {"f"},
    ),
    "docker export: devices and pipes": (
        whole(
            ("dev/null", device(1, 3)),
            ("dev/initctl", fifo()),
            ("dev/fd", symlink("/proc/self/fd")),
        ),
        {"dev", "dev/null", "dev/initctl", "dev/fd"},
    ),
    "git archive: a global header": (GLOBAL + whole(("f", FILE)), {"f"}),
    "before ustar: a folder is a file with a slash": (OLD + bytes(1024), {"old"}),
    "GNU tar --append: a second archive behind the end": (
        whole(("f", FILE)) + whole(("g", FILE)),
        {"f"},
    ),
    "a layer of nothing": (b"", set()),
    "a layer of an end": (bytes(1024), set()),
    "a folder over a link to it": (
        whole(
            ("usr/lib", directory()),
            ("lib", symlink("usr/lib")),
            ("lib/a", FILE),
            ("lib/", directory()),
        ),
        {"usr", "usr/lib", "usr/lib/a", "lib"},
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_odd_layers_are_accepted(tmp_path: Path, kind: str) -> None:
    """The layer shows the expected files, whether it is unpacked or mounted."""
    tar, expected = LAYERS[kind]
    outcome, files = same(tar, tmp_path)
    assert outcome == "files" and isinstance(files, dict)
    assert {name.decode() for name in files} - {"."} == expected


def test_a_hard_link_into_a_lower_layer_is_refused_by_its_name(take: Take) -> None:
    # containerd refuses such a layer, too: its unpacker links inside the layer's own folder.
    with pytest.raises(
        BadLayer, match="'a': a hard link to 'bin/sh', which the layer does not have"
    ):
        take(raw_tar(("bin", directory()), ("a", hardlink("bin/sh"))))


def members_of_estargz(tar: bytes) -> bytes:
    """Return the tar as several gzip members, of which the last is empty, like an eStargz layer."""
    return b"".join(gzip.compress(part) for part in (tar[:512], tar[512:1024], tar[1024:], b""))


def frames_of_zstd_chunked(tar: bytes) -> bytes:
    """Return the tar as zstd frames among frames that decoders skip, like Buildah and Podman."""
    # stands for the table of contents
    skipped = b"\x50\x2a\x4d\x18" + (64).to_bytes(4, "little") + bytes(64)
    frames = [zstd.compress(tar[:1024]), zstd.compress(tar[1024:])]
    return b"".join((frames[0], skipped, frames[1], skipped, skipped))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "eStargz": members_of_estargz,
    "zstd:chunked": frames_of_zstd_chunked,
    "zstd that begins with a skipped frame": lambda tar: (
        b"\x50\x2a\x4d\x18" + bytes(4) + zstd.compress(tar)
    ),
}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_odd_compression_is_accepted(tmp_path: Path, kind: str) -> None:
    tar = raw_tar(("a", LayerFile(b"x" * 5000)), ("b", FILE))
    (tmp_path / "blob").write_bytes(COMPRESSED[kind](tar))
    with open(tmp_path / "blob", "rb") as blob:
        assert b"".join(map(bytes, TarStream(blob.fileno()).blocks())) == tar
