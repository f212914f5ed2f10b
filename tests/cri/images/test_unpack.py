"""Tests that layers are unpacked like GNU tar does, with whiteouts that overlayfs understands."""

from __future__ import annotations

import gzip
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from cri_server.images.archives import build
from cri_server.images.archives.build import LayerFile, directory, layer, symlink
from cri_server.images.erofs.layer_tar import write_tar
from cri_server.images.formats.digests import digest_of
from cri_server.images.layers.inflate import WINDOW_LOG_LIMIT, BadLayer, TarStream, UnpackLimits
from cri_server.images.store.unpacked_layers import Layers, chain_ids
from pyrunc.errors import ResourceExhausted
from tests.cri.images.conftest import Unpack, unpack_bytes
from tests.cri.images.trees import names, snapshot
from tests.support.oci_archives import compressed

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service+ep


def make_everything(root: Path) -> None:
    """Make a folder with each kind of file and each attribute that an image can have."""
    root.mkdir()
    (root / "plain").write_bytes(random.Random(1).randbytes(100_001))
    (root / "empty").touch()
    (root / "folder" / "deeper").mkdir(parents=True)
    (root / "folder" / "deeper" / ("long-" * 45)).write_text("a name of 225 bytes")
    far = root.joinpath("very", *["some-folder-name"] * 20)
    far.mkdir(parents=True)
    (far / "file").write_text("a path of more than 300 bytes")
    (root / "link").symlink_to("plain")
    (root / "dangling").symlink_to("/nowhere/" + "x" * 200)
    os.link(root / "plain", root / "folder" / "hard")
    os.link(root / "dangling", root / "hard-to-link", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o660, os.makedev(253, 17))
    (root / "bytes-\udcff\udcfe").write_text("a name that is not UTF-8")
    (root / "ünï-codé").write_text("one that is")
    (root / " spaces and\nnewline ").write_text("")
    with open(root / "sparse", "wb") as file:
        for at in (0, 1 << 20, 5 << 20, (5 << 20) + 8192):
            file.seek(at)
            file.write(b"data" * 1024)
        file.truncate(20 << 20)
    with open(root / "hole", "wb") as file:
        file.truncate(3 << 20)
    with open(root / "holes", "wb") as file:
        for number in range(60):
            file.seek(number * 64 << 10)
            file.write(b"x" * 4096)
    attributes = [
        ("plain", 0o4755, 0, 0),
        ("empty", 0o2711, 12, 34),
        ("folder", 0o1777, 0, 0),
        ("folder/deeper", 0o2775, 1000, 1000),
        ("ünï-codé", 0o000, 65534, 65534),
        ("sparse", 0o600, 3_000_000_000, 3_000_000_000),
    ]
    for name, mode, uid, gid in attributes:
        os.chown(root / name, uid, gid)
        os.chmod(root / name, mode)
    os.chown(root / "link", 5, 6, follow_symlinks=False)
    os.setxattr(root / "plain", "security.capability", CAPABILITY)
    os.setxattr(root / "plain", "user.note", b"binary \x00\xff=\n value")
    os.setxattr(root / "folder", "user.kind", b"folder")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_500_000_000_123_456_789 + number * 10**9), follow_symlinks=False)
    os.utime(root / "empty", ns=(0, -86_400 * 10**9))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "everything"
    make_everything(root)
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--format=posix", "--xattrs", "--xattrs-include=*"],
        ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=1.0"],
        ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.1"],
        ["--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.0"],
        ["--format=gnu"],
        ["--format=gnu", "--sparse"],
    ],
    ids=lambda options: " ".join(o.removeprefix("--") for o in options if "xattrs" not in o),
)
def test_an_unpacked_tree_equals_that_of_gnu_tar(
    everything: Path, tmp_path: Path, unpacked: Unpack, options: list[str]
) -> None:
    archive = tmp_path / "layer.tar"
    subprocess.run(["tar", "-C", str(everything), *options, "-cf", str(archive), "."], check=True)
    reference = tmp_path / "reference"
    reference.mkdir()
    extract = [
        "tar",
        "-C",
        str(reference),
        *["--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*"],
    ]
    subprocess.run([*extract, "-xf", str(archive)], check=True)
    ours = unpacked(gzip.compress(archive.read_bytes(), 1))
    assert snapshot(ours) == snapshot(reference)
    if "--format=posix" in options:
        assert snapshot(ours) == snapshot(everything)
    if "--sparse" in options:
        assert (ours / "sparse").stat().st_blocks <= (everything / "sparse").stat().st_blocks + 64
        assert (ours / "hole").stat().st_blocks == 0


def test_the_prefix_field_of_ustar_is_read(tmp_path: Path, unpacked: Unpack) -> None:
    source = tmp_path / "source"
    folder = source.joinpath(*["a-folder-whose-name-is-longer"] * 5)
    folder.mkdir(parents=True)
    (folder / "file").write_text("content")
    archive = tmp_path / "layer.tar"
    subprocess.run(["tar", "-C", source, "--format=ustar", "-cf", archive, "."], check=True)
    assert names(unpacked(archive.read_bytes())) == names(source)


@pytest.mark.parametrize("compress", ["", "gzip", "zstd"])
def test_every_compression_is_unpacked(unpacked: Unpack, compress: str) -> None:
    data = layer({"a": b"x" * 3_000_000, "b": "b"})
    packed = compressed(data, compress)
    tree = unpacked(packed)
    assert (tree / "a").read_bytes() == b"x" * 3_000_000 and (tree / "b").read_text() == "b"


@pytest.mark.parametrize("compress", ["gzip", "zstd"])
def test_the_diff_id_covers_concatenated_members(tmp_path: Path, compress: str) -> None:
    data = layer({"a": random.Random(2).randbytes(900_000), "b": "b"})
    packed = b"".join(
        compressed(data[at : at + 10_000], compress) for at in range(0, len(data), 10_000)
    )
    (tmp_path / "layer").mkdir()
    assert unpack_bytes(packed, tmp_path / "layer").diff_id == digest_of(data)
    assert len((tmp_path / "layer" / "tree" / "a").read_bytes()) == 900_000


def test_later_entries_replace_earlier_entries(unpacked: Unpack) -> None:
    tree = unpacked(
        raw_tar(
            ("d", directory()),
            ("d/file", LayerFile(b"1")),
            ("d/file", LayerFile(b"22", mode=0o600)),
            ("was-dir", directory()),
            ("was-dir/inside", LayerFile(b"x")),
            ("was-dir", LayerFile(b"now a file")),
            ("was-file", LayerFile(b"x")),
            ("was-file", directory(0o700)),
            ("was-file/inside", LayerFile(b"y")),
            ("was-link", symlink("d")),
            ("was-link", LayerFile(b"not through the link")),
            ("d", directory(0o711)),
        )
    )
    assert (tree / "d/file").read_bytes() == b"22" and stat.S_IMODE(
        (tree / "d").stat().st_mode
    ) == 0o711
    assert (tree / "was-dir").read_bytes() == b"now a file"
    assert (tree / "was-file/inside").read_bytes() == b"y"
    assert not (tree / "was-link").is_symlink() and names(tree / "d") == {"file"}


def test_parents_behind_links_are_found_inside_the_layer(unpacked: Unpack) -> None:
    tree = unpacked(
        raw_tar(
            ("usr/lib", directory()),
            ("lib", symlink("usr/lib")),
            ("lib/a", LayerFile(b"a")),
            ("absolute", symlink("/usr/lib")),
            ("absolute/b", LayerFile(b"b")),
            ("up", symlink("../../../../usr/lib")),
            ("up/c", LayerFile(b"c")),
            ("var/run", symlink("/run")),
            ("var/run/made/d", LayerFile(b"d")),
        )
    )
    assert names(tree / "usr/lib") == {"a", "b", "c"} and (tree / "run/made/d").read_bytes() == b"d"


def raw_tar(*members: tuple[str, LayerFile]) -> bytes:
    """Return a tar of exactly these (name, file) members, in this order and with these names."""
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, node in members:
            build._add(tar, name, node)
    return buffer.getvalue()


# ---- layers over each other


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    layers = Stack(tmp_path)
    yield layers
    layers.unmount()


class Stack:
    """An overlayfs mount of unpacked layers, like that of a container."""

    def __init__(self, folder: Path) -> None:
        self.layers = Layers(folder / "store")
        for name in ("store", "merged"):
            (folder / name).mkdir()
        self.layers.prepare()
        self.merged = folder / "merged"
        self._mounted = False

    def mount(self, tars: Sequence[bytes]) -> Path:
        """Unpack the layers (bottom first) and mount them; return the merged folder."""
        chain = chain_ids([digest_of(data) for data in tars])
        for number, data in enumerate(tars):
            unpack_bytes(data, Path(folder := self.layers.new_folder()))
            self.layers.commit(folder, chain[: number + 1])
        lower = [str(path) for path in self.layers.lower_dirs(chain)]
        if len(lower) == 1:
            return Path(lower[0])
        options = "lowerdir=" + ":".join(lower)
        # mount(2), whose options are a page long; fsconfig(2), which newer programs prefer, takes
        # 255 bytes for each
        environment = os.environ | {"LIBMOUNT_FORCE_MOUNT2": "always"}
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(self.merged)]
        subprocess.run(command, check=True, env=environment)
        self._mounted = True
        return self.merged

    def unmount(self) -> None:
        if self._mounted:
            subprocess.run(["umount", self.merged], check=True)


BASE = layer(
    {
        "etc": directory(0o755), "etc/passwd": "root", "etc/shadow": LayerFile(b"secret", 0o600),
        "opt": directory(0o750, uid=7, gid=8), "opt/old/file": "old", "opt/old/more": "more",
        "tmp": directory(0o1777), "bin/sh": "sh",
    }
)  # fmt: skip


def test_a_whiteout_hides_the_file_of_lower_layers(stack: Stack) -> None:
    merged = stack.mount(
        [BASE, raw_tar(("etc/.wh.shadow", LayerFile()), ("opt/.wh.old", LayerFile()))]
    )
    assert names(merged / "etc") == {"passwd"} and names(merged / "opt") == set()


def test_an_opaque_directory_hides_the_content_of_lower_layers(stack: Stack) -> None:
    merged = stack.mount(
        [
            BASE,
            raw_tar(
                ("opt", directory()),
                ("opt/.wh..wh..opq", LayerFile()),
                ("opt/new", LayerFile(b"n")),
            ),
        ]
    )
    assert names(merged / "opt") == {"new"}


@pytest.mark.parametrize("whiteout_first", [True, False])
@pytest.mark.parametrize("what", ["directory", "implicit directory", "file"])
def test_a_layer_may_have_a_whiteout_and_a_file_of_the_same_name(
    stack: Stack, whiteout_first: bool, what: str
) -> None:
    """The layer's own file or directory stays, and hides that of the lower layer: two directories
    do not merge."""
    new = {
        "directory": [("opt/old", directory()), ("opt/old/new", LayerFile(b"n"))],
        "implicit directory": [("opt/old/new", LayerFile(b"n"))],
        "file": [("opt/old", LayerFile(b"now a file"))],
    }[what]
    whiteout = [("opt/.wh.old", LayerFile())]
    merged = stack.mount([BASE, raw_tar(*(whiteout + new if whiteout_first else new + whiteout))])
    if what == "file":
        assert (merged / "opt/old").read_bytes() == b"now a file"
    else:
        assert names(merged / "opt") == {"old", "old/new"}


def test_an_opaque_root_hides_everything(stack: Stack) -> None:
    merged = stack.mount([BASE, raw_tar((".wh..wh..opq", LayerFile()), ("only", LayerFile(b"x")))])
    assert names(merged) == {"only"}


def test_undescribed_directories_have_the_attributes_of_lower_layers(stack: Stack) -> None:
    merged = stack.mount(
        [
            BASE,
            raw_tar(("tmp/x", LayerFile(b"x")), ("opt/y/z", LayerFile(b"y"))),
            raw_tar(("opt/w", LayerFile())),
        ]
    )
    facts = snapshot(merged)
    assert (facts[b"tmp"].mode, facts[b"opt"].mode, facts[b"opt"].owner) == (0o1777, 0o750, (7, 8))
    assert (facts[b"opt/y"].mode, facts[b"opt/y"].owner) == (0o755, (0, 0))


def test_an_undescribed_directory_has_no_attributes_of_a_hidden_directory(stack: Stack) -> None:
    hidden = raw_tar((".wh.opt", LayerFile()))
    merged = stack.mount([BASE, hidden, raw_tar(("opt/new", LayerFile(b"n")))])
    facts = snapshot(merged)
    assert names(merged / "opt") == {"new"} and facts[b"opt"].owner == (0, 0)


def test_many_layers_equal_tars_unpacked_by_gnu_tar_into_one_folder(
    stack: Stack, tmp_path: Path
) -> None:
    chance = random.Random(5)
    tars = []  # without whiteouts
    for number in range(12):
        files: dict[str, LayerFile | bytes | str] = {}
        for _ in range(25):
            name = "/".join(f"d{chance.randrange(3)}" for _ in range(chance.randrange(1, 4)))
            files[f"{name}/f{chance.randrange(8)}"] = LayerFile(
                chance.randbytes(20), chance.choice([0o644, 0o4755]), uid=number, mtime=number
            )
        tars.append(layer(files))
    reference = tmp_path / "reference"
    reference.mkdir()
    for data in tars:
        subprocess.run(
            ["tar", "-C", reference, "--numeric-owner", "-p", "-xf", "-"],
            input=data,
            check=True,
        )
    merged, expected = snapshot(stack.mount(tars)), snapshot(reference)
    for entries in (
        merged,
        expected,
    ):  # GNU tar loses a folder's time when it replaces a file in it
        entries.pop(b".")
        entries.update(
            {name: replace(f, mtime_ns=0) for name, f in entries.items() if f.kind == "d"}
        )
    assert merged == expected


# ---- bounds


@pytest.mark.parametrize("compress", ["gzip", "zstd"])
def test_a_decompression_bomb_is_stopped_at_the_limit(tmp_path: Path, compress: str) -> None:
    """A layer with more decompressed bytes than the limit is refused, however small its blob."""
    # the limit is checked before the bytes are written
    data = compressed(layer({"zeros": bytes(60 << 20), "more": bytes(60 << 20)}), compress)
    (tmp_path / "layer").mkdir()
    with pytest.raises(ResourceExhausted, match="unpacks to more than 67108864 bytes"):
        unpack_bytes(data, tmp_path / "layer", UnpackLimits(size_bytes=64 << 20))


@pytest.mark.parametrize("compress", ["gzip", "zstd"])
def test_layers_that_compress_well_are_accepted_and_stored_sparsely(
    tmp_path: Path, compress: str
) -> None:
    # such files compress to a thousandth
    size = 120 << 20
    tar = layer(
        {"preallocated": bytes(size), "var/log/lastlog": bytes(5000) + b"login" + bytes(300_000)}
    )
    data = gzip.compress(tar, 9) if compress == "gzip" else compressed(tar, compress)
    assert len(tar) > 500 * len(data)
    (tmp_path / "layer").mkdir()
    unpack_bytes(data, tmp_path / "layer")
    tree = tmp_path / "layer/tree"
    assert (tree / "preallocated").stat().st_size == size
    assert (tree / "preallocated").stat().st_blocks * 512 < 1 << 20
    assert (tree / "var/log/lastlog").read_bytes() == bytes(5000) + b"login" + bytes(300_000)
    (tmp_path / "blob").write_bytes(data)
    with open(tmp_path / "blob", "rb") as blob:
        write_tar(TarStream(blob.fileno()), str(tmp_path), digest_of(tar))
    assert (tmp_path / "tar").read_bytes() == tar
    assert (tmp_path / "tar").stat().st_blocks * 512 < 2 << 20


def test_a_layer_may_exceed_neither_its_size_nor_its_entries(tmp_path: Path) -> None:
    for number, (limits, words) in enumerate(
        [
            (UnpackLimits(size_bytes=1 << 20), "more than 1048576 bytes"),
            (UnpackLimits(entries=50), "more than 50 entries"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ResourceExhausted, match=words):
            unpack_bytes(
                layer({f"f{n}": random.Random(n).randbytes(40_000) for n in range(60)}),
                tmp_path / str(number),
                limits,
            )


def test_a_huge_sparse_file_counts_with_its_size(unpacked: Unpack, tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 42)
    data = subprocess.run(
        ["tar", "-C", tmp_path, "--sparse", "-c", "huge"], check=True, capture_output=True
    ).stdout
    with pytest.raises(ResourceExhausted, match="a file of 4398046511104 bytes"):
        unpacked(data)


def test_a_million_empty_members_are_refused_soon() -> None:
    fd = os.memfd_create("blob", os.MFD_CLOEXEC)
    try:
        os.write(fd, gzip.compress(b"", mtime=0) * 1_000_000)
        os.lseek(fd, 0, os.SEEK_SET)
        with pytest.raises(BadLayer, match="empty gzip members"):
            TarStream(fd).drain()
    finally:
        os.close(fd)


def test_a_zstd_window_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    # the header of a frame may demand gigabytes of memory from its reader
    compressor = zstd.ZstdCompressor(
        options={zstd.CompressionParameter.window_log: WINDOW_LOG_LIMIT + 1}
    )
    data = compressor.compress(layer({"a": random.Random(1).randbytes(1000)})) + compressor.flush()
    (tmp_path / "layer").mkdir()
    with pytest.raises(BadLayer, match="zstd data is damaged"):
        unpack_bytes(data, tmp_path / "layer")
