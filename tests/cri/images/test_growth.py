"""Tests that the work for a layer or an archive grows linearly with its size."""

from __future__ import annotations

import io
import itertools
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from cri_server.images.archives import build
from cri_server.images.archives.load import load, open_archive
from cri_server.images.layers.inflate import BadLayer, TarStream, UnpackLimits
from cri_server.images.store.blobs import Blobs
from cri_server.images.store.unpacked_layers import Layers
from pyrunc.errors import Error, ResourceExhausted
from pyrunc.kernel.tree import remove_path
from tests.cri.images.conftest import unpack_bytes
from tests.support.growth import Work, check_growth
from tests.support.oci_archives import oci_archive


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in memory."""
    # a disk's file system would add its own time for each directory
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


FOLDER, LINK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def tar(entries: Iterable[tuple[str, bytes, str]]) -> bytes:
    """Return a tar with these (name, type, link target) entries, all without content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, link in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            archive.addfile(info)
    return file.getvalue()


def replaced(size: int) -> bytes:
    """Return a tar with `size` directories, each replaced by a file, and `size` that stay."""
    stay = ((f"s{n}", FOLDER, "") for n in range(size))
    change = ((f"d{n}", kind, "") for n in range(size) for kind in (FOLDER, tarfile.REGTYPE))
    return tar([*stay, *change])


def turning(size: int) -> bytes:
    """Return a tar in which a name is `size` times a directory and then a file."""
    stay = ((f"s{n}", FOLDER, "") for n in range(size))
    return tar(
        [*stay, *(("x", kind, "") for _ in range(size) for kind in (FOLDER, tarfile.REGTYPE))]
    )


LAYERS: dict[str, Callable[[int], bytes]] = {
    "replaced": replaced,
    "turning": turning,
    "implicit": lambda size: tar((f"{n}/a/b/c/d", tarfile.REGTYPE, "") for n in range(size)),
    "deep": lambda size: tar([("/".join("a" * size * 8) + "/f", tarfile.REGTYPE, "")]),
    "deep often": lambda size: tar(
        (f"{n}/" + "/".join("a" * 300) + "/f", tarfile.REGTYPE, "") for n in range(size // 8)
    ),
    "whiteouts": lambda size: tar((f"{n}/.wh.x", tarfile.REGTYPE, "") for n in range(size)),
    "hidden and made": lambda size: tar(
        itertools.chain.from_iterable(
            ((f"{n}/.wh.x", tarfile.REGTYPE, ""), (f"{n}/x/y", tarfile.REGTYPE, ""))
            for n in range(size)
        )
    ),
    "opaque": lambda size: tar((f"{n}/.wh..wh..opq", tarfile.REGTYPE, "") for n in range(size)),
    "links": lambda size: tar(
        [("l", LINK, "."), *((f"l/l/l/{n}", tarfile.REGTYPE, "") for n in range(size))]
    ),
    "links up and down": lambda size: tar(
        [("a", FOLDER, ""), ("l", LINK, "a/../" * size), ("l/f", tarfile.REGTYPE, "")]
    ),
    "hard links": lambda size: tar(
        [("f", tarfile.REGTYPE, ""), *((f"h{n}", HARD, "f") for n in range(size))]
    ),
    "one file": lambda size: tar(("f", tarfile.REGTYPE, "") for _ in range(size)),
    "fifos": lambda size: tar(
        ("f", kind, "") for _ in range(size) for kind in (tarfile.FIFOTYPE, FOLDER)
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_work_for_layers_grows_linearly(name: str, memory: Path) -> None:
    count = itertools.count()

    def prepare(size: int) -> Work:
        blob, root = LAYERS[name](size), memory / str(next(count))
        layers = Layers(root)
        root.mkdir()
        layers.prepare()
        below = layers.new_folder()  # the layer under the measured one
        unpack_bytes(tar([("a", FOLDER, ""), ("0", FOLDER, "")]), Path(below))
        layers.commit(below, ["sha256:0"])
        folder = layers.new_folder()

        def run() -> None:
            try:
                unpack_bytes(blob, Path(folder))
                layers.commit(folder, ["sha256:0", "sha256:1"])
            except BadLayer:
                pass
            finally:
                remove_path(root)

        return run

    check_growth(prepare, 32, largest=256 if name.startswith("deep") else 1 << 13)


HEADERS: dict[str, Callable[[int], bytes]] = {
    "records": lambda size: special(b"x", b"".join(record(f"k{n}", "v") for n in range(size))),
    "one record": lambda size: special(b"x", record("k", "v") * size),
    "long record": lambda size: special(b"x", record("k", "v" * size)),
    "pairs": lambda size: special(
        b"x", (record("GNU.sparse.offset", "0") + record("GNU.sparse.numbytes", "0")) * size
    ),
    "map": lambda size: special(
        b"x", record("GNU.sparse.map", ",".join("0" * 2 * size)) + record("GNU.sparse.size", "0")
    ),
    "headers": lambda size: special(b"x", record("k", "v")) * size,
    "headers of other keys": lambda size: b"".join(
        special(b"x", record(f"k{n}", "v")) for n in range(size)
    ),
    "long names": lambda size: special(b"L", b"n" * 600) * size,
    "global": lambda size: special(b"g", record("k", "v")) * size,
    "attributes": lambda size: special(
        b"x", b"".join(record(f"SCHILY.xattr.user.k{n}", "v") for n in range(size))
    ),
}


def record(key: str, value: str) -> bytes:
    size = len(key) + len(value) + 3
    while len(text := f"{size} {key}={value}\n") != size:
        size = len(text)
    return text.encode()


def special(kind: bytes, data: bytes) -> bytes:
    info = tarfile.TarInfo("special")
    info.type, info.size = kind, len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512)


@pytest.mark.parametrize("name", HEADERS)
def test_the_work_for_headers_grows_linearly(name: str, memory: Path) -> None:
    count = itertools.count()

    def prepare(size: int) -> Work:
        blob = HEADERS[name](size) + tar([("f", tarfile.REGTYPE, "")])
        folder = memory / str(next(count))
        folder.mkdir()

        def run() -> None:
            try:
                unpack_bytes(blob, folder)
            except (
                BadLayer,
                ResourceExhausted,
            ):  # the latter: more attributes than the file system takes
                pass

        return run

    check_growth(prepare, 500, largest=1 << 16)


def test_the_total_of_special_headers_has_a_limit(tmp_path: Path) -> None:
    # special headers wait in memory for the member that they describe
    part = special(b"x", record("k", "v" * 900_000))
    with pytest.raises(BadLayer, match="extended headers of more than"):
        unpack_bytes(part * 3 + tar([("f", tarfile.REGTYPE, "")]), tmp_path)


def test_replaced_entries_are_forgotten(tmp_path: Path) -> None:
    """When a layer replaces a directory by a file, the directory's children are forgotten."""
    entries = [
        ("d/e/f", tarfile.REGTYPE, ""), ("d", tarfile.REGTYPE, ""),
        ("g/h/i", tarfile.REGTYPE, ""), ("g", tarfile.REGTYPE, ""), ("g/h", FOLDER, ""),
    ]  # fmt: skip
    no, yes = tmp_path / "no", tmp_path / "yes"
    no.mkdir()
    yes.mkdir()
    with pytest.raises(BadLayer):  # a file is no parent
        unpack_bytes(tar(entries), no)
    layer = unpack_bytes(
        tar([*entries[:-1], ("g", FOLDER, ""), ("g/h/j", tarfile.REGTYPE, "")]), yes
    )
    assert layer.implicit == ["", "g/h"]
    assert (yes / "tree" / "d").is_file()
    assert (yes / "tree" / "g" / "h").stat().st_mtime_ns == 0


def test_the_paths_in_a_layers_record_are_not_kept_in_memory(tmp_path: Path) -> None:
    layers = Layers(tmp_path)
    layers.prepare()
    folder = layers.new_folder()
    assert unpack_bytes(tar([("g/h", tarfile.REGTYPE, "")]), Path(folder)).implicit == ["", "g"]
    chain_id = "sha256:" + "0" * 64
    layers.commit(folder, [chain_id])
    committed, restarted = layers.get(chain_id), Layers(tmp_path)
    restarted.prepare()
    assert committed is not None and committed.implicit == []
    assert restarted.get(chain_id) == committed


@pytest.mark.parametrize("kind", ["docker", "layout"])
def test_the_work_for_an_archive_that_names_an_image_often_grows_linearly(
    kind: str, memory: Path
) -> None:
    count = itertools.count()

    def prepare(size: int) -> Work:
        # the image's configuration grows with the number of its names
        built = build.image([], {"Env": [f"K{n}=v" for n in range(10 * size)]})
        images = {f"host/a:{n}": built for n in range(size)}
        root = memory / str(next(count))
        root.mkdir()
        (root / "archive").write_bytes(
            build.docker_archive(images) if kind == "docker" else oci_archive(images)
        )
        blobs = Blobs(root)
        blobs.prepare()

        def run() -> None:
            try:
                with open_archive(root / "archive") as fd:
                    load(blobs, TarStream(fd, UnpackLimits(size_bytes=1 << 30)), None)
            except Error:
                pass

        return run

    check_growth(prepare, 64, largest=900)
