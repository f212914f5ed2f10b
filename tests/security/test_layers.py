"""Attacks with layers that are small to send and cost much time, memory or disk, in the unpacked
and the mounted image store.

Tests count steps, directories, blocks or processes instead of measuring time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.containers import anonymous_volumes
from cri_server.images.archives import build
from cri_server.images.archives.build import LayerFile, directory, symlink
from cri_server.images.erofs import merge
from cri_server.images.erofs.layer_tar import write_tar
from cri_server.images.erofs.node import ErofsNode as MergedNode
from cri_server.images.formats.digests import digest_of
from cri_server.images.layers import inherit, jail, turns, walk_budget
from cri_server.images.layers.inflate import BadLayer, TarStream, UnpackLimits
from cri_server.images.layers.trees import DirectoryWalker
from cri_server.images.service import ImageService
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.space import SpaceLimit
from cri_server.images.store.unpacked_layers import Layers
from cri_server.images.waiting import Abandoned, Watch
from cri_server.spec.mounts import MountRequest
from pyrunc.errors import ResourceExhausted
from pyrunc.kernel.mount import open_mount
from pyrunc.kernel.reaper import set_child_subreaper
from tests.cri.images.conftest import unpack_bytes, with_jobs
from tests.cri.images.indexes import mounted, write_index
from tests.cri.images.test_hostile import hardlink
from tests.cri.images.test_unpack import raw_tar
from tests.cri.images.trees import names
from tests.support.oci_archives import manifest_of
from tests.support.registry import Registry

Members = list[tuple[str, LayerFile]]
Take = Callable[..., None]


@pytest.fixture(params=["unpacked", "mounted"])
def take(request: pytest.FixtureRequest, tmp_path: Path) -> Take:
    """Provide a function that adds a layer to an image store of the parameter's kind, or raises the
    store's error."""
    numbers = itertools.count()

    def run(tar: bytes, limits: UnpackLimits | None = None) -> None:
        folder = tmp_path / f"taken-{next(numbers)}"
        folder.mkdir()
        if request.param == "unpacked":
            unpack_bytes(tar, folder, limits)
        else:
            write_index(folder, [tar], limits)

    return run


FAR = "a/../" * 800  # 1,600 steps in one link
OVER_LINKS: dict[str, Callable[[int], Members]] = {
    "other names over one link": lambda count: [
        ("a", directory()),
        ("l", symlink(FAR)),
        *((f"l/d{n}/f", LayerFile()) for n in range(count)),
    ],
    "a link that is replaced each time": lambda count: [
        ("a", directory()),
        *itertools.chain.from_iterable(
            [("l", symlink(FAR)), ("l/f", LayerFile())] for _ in range(count)
        ),
    ],
    "hard links over one link": lambda count: [
        ("a", directory()),
        ("f", LayerFile()),
        ("l", symlink(FAR)),
        *itertools.chain.from_iterable(
            [(f"l/d{n}", directory()), (f"l/d{n}/h", hardlink("l/f"))] for n in range(count)
        ),
    ],
    "whiteouts over one link": lambda count: [
        ("a", directory()),
        ("l", symlink(FAR)),
        *((f"l/d{n}/.wh.x", LayerFile()) for n in range(count)),
    ],
    "a directory that is replaced each time": lambda count: [
        ("a", directory()),
        ("l", symlink(FAR)),
        *itertools.chain.from_iterable(
            [("d", directory()), ("d", LayerFile()), ("l/f", LayerFile())] for _ in range(count)
        ),
    ],
    "directories that no entry describes": lambda count: [
        (f"{n}/{'d/' * 300}f", LayerFile()) for n in range(count)
    ],
}


@pytest.mark.parametrize("kind", OVER_LINKS)
def test_a_layer_whose_names_need_too_many_steps_is_refused(take: Take, kind: str) -> None:
    """CWE-400, CWE-59: names of a layer lead through links with targets of 4,000 bytes, or through
    hundreds of directories. The limit of steps is proportional to the layer's entries: 8 such names
    are within it, and 60 exceed it."""
    take(raw_tar(*OVER_LINKS[kind](8)))
    # Without a limit, 13 kB of gzip occupied one of two layer jobs for 22 seconds.
    with pytest.raises(BadLayer, match="steps over directories and links for"):
        take(raw_tar(*OVER_LINKS[kind](60)))


def test_a_replaced_link_costs_no_further_steps(
    take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CWE-400: a layer replaces a link 500 times, each time followed by a name that leads over
    another link. A link costs no step if no name leads over it, however often it is replaced."""
    monkeypatch.setattr(walk_budget.WalkBudget.__init__, "__defaults__", (5000, 0, 0))
    # Without this rule each replacement makes the next name be resolved anew.
    again = itertools.chain.from_iterable(
        [("t", symlink("x")), ("l/f", LayerFile())] for _ in range(500)
    )
    take(raw_tar(("a", directory()), ("l", symlink(FAR)), *again))


def test_undescribed_directories_count_as_entries(take: Take) -> None:
    """CWE-770: directories that no entry of a layer describes count towards its limit of entries.
    Nine files with twenty-seven such directories are refused at a limit of twenty."""
    take(raw_tar(*((f"{n}/f", LayerFile()) for n in range(9))), UnpackLimits(entries=20))
    with pytest.raises(ResourceExhausted, match="more than 20 entries"):
        take(raw_tar(*((f"{n}/a/b/f", LayerFile()) for n in range(9))), UnpackLimits(entries=20))


def test_attributes_of_a_repeated_directory_are_added_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CWE-407: a layer has many entries for one directory, each with another attribute. All
    attributes are added to one dictionary, since a copy for each entry would take quadratic
    time."""
    members = [("d", directory(pax={f"SCHILY.xattr.user.{n}": "v"})) for n in range(40)]
    seen = set()
    take_attributes = MergedNode.take_attributes

    def watched(self: MergedNode, other: MergedNode) -> None:
        take_attributes(self, other)
        seen.add(id(self.xattrs))

    monkeypatch.setattr(MergedNode, "take_attributes", watched)
    with mounted(tmp_path / "image", [raw_tar(*members)]) as root:
        assert names(root) == {"d"}
    assert len(seen) <= 2  # the second one is the root's empty layer


def test_a_repeated_layer_is_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CWE-400: a manifest names one layer a hundred times. The layer is merged once, at the last
    position that the manifest gives it."""
    layers = []

    def counted() -> MergedNode:
        layers.append(1)
        return directory_node()

    directory_node = merge.directory
    monkeypatch.setattr(merge, "directory", counted)
    large = raw_tar(*((f"d{n}/f", LayerFile(b"large")) for n in range(50)))
    other = raw_tar(("d1/f", LayerFile(b"other")), ("d2/g", LayerFile(b"other")))
    with mounted(tmp_path / "image", [*[large, other] * 100, large]) as root:
        assert (root / "d1/f").read_bytes() == b"large"
        assert (root / "d2/g").read_bytes() == b"other"
    assert len(layers) < 2 * 52


class _Chain:
    """An image's layers in the unpacked store, committed bottom first."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.layers = Layers(root)
        self.layers.prepare()
        self._chain: list[str] = []

    def add(self, *members: tuple[str, LayerFile]) -> Path:
        """Unpack and commit a layer; return the folder of its files."""
        folder = self.layers.new_folder()
        unpack_bytes(raw_tar(*members), Path(folder))
        self._chain.append(f"sha256:{len(self._chain)}")
        self.layers.commit(folder, self._chain)
        return self.layers.tree(self._chain[-1])


def test_undescribed_directories_are_looked_up_only_in_layers_with_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CWE-407: a directory that no entry of a layer describes gets its attributes from the layers
    below. Layers without its parent directory are skipped, and the number of such directories
    limits the lookups in the others."""
    chain = _Chain(tmp_path / "layers")
    chain.add(("a", directory(0o700, uid=7)))
    # An image may have 500 layers, each of which would be searched for each directory.
    for number in range(30):
        chain.add((f"other{number}", directory()))
    opened: list[bytes] = []

    class CountingWalker(DirectoryWalker):
        def open(self, path: bytes) -> int:
            opened.append(path)
            return super().open(path)

    monkeypatch.setattr(inherit, "DirectoryWalker", CountingWalker)
    tree = chain.add((f"a/{'b/' * 50}f", LayerFile()))
    assert (tree / "a").stat().st_uid == 7 and (tree / "a/b").stat().st_uid == 0
    assert 51 < len(opened) < 31 + 4 * 51
    monkeypatch.setattr(inherit, "FREE_STEPS", 0)
    monkeypatch.setattr(inherit, "STEPS_PER_DIRECTORY", 8)
    for _ in range(12):
        chain.add(("many", directory()))
    with pytest.raises(BadLayer, match="steps over directories and links"):
        chain.add(*((f"many/{n}/f", LayerFile()) for n in range(100)))


@pytest.mark.usefixtures("no_orphans")
async def test_all_copies_of_an_unpacked_layer_share_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CWE-400: the unpacked store makes a folder for each time that a manifest names a layer. All
    these copies together have the limits of one layer; an image that has its empty layer often is
    accepted."""
    monkeypatch.setattr(SpaceLimit, "limits_of_layer", lambda self: UnpackLimits(entries=100))
    monkeypatch.setitem(ImageService.__init__.__kwdefaults__ or {}, "store", "unpacked")
    large = build.layer({f"f{n}": b"" for n in range(15)})
    image = build.image([large, *[build.layer({})] * 20, large])
    with Registry(tmp_path / "registry") as registry:
        registry.push("often:1", build.image([large] * 7))
        registry.push("taken:1", image)
        async with with_jobs(tmp_path) as service:
            with pytest.raises(ResourceExhausted, match="more than 14 entries"):
                await service.pull(f"{registry.host}/often:1")
            assert await service.pull(f"{registry.host}/taken:1") == image.id


# ---- disks


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of `size_bytes`; yield its path."""
    fd = open_mount("tmpfs", [("size", str(size_bytes))])
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def has_reserve(disk: Path) -> bool:
    """Return whether the disk space that is reserved for the node is still free."""
    statistics = os.statvfs(disk)
    return (
        statistics.f_bavail * statistics.f_frsize > statistics.f_blocks * statistics.f_frsize // 50
    )


@pytest.mark.parametrize("store", ["unpacked", "mounted"])
def test_sparse_files_are_charged_by_blocks(store: str) -> None:
    """CWE-409: a sparse file with one byte in each block takes 4,096 times its data on the disk.
    The layer is refused while the node's reserve of disk space is still free."""
    count = 20_000
    pairs = ",".join(f"{n * 4096},1" for n in range(count))
    sparse = LayerFile(
        bytes([7]) * count, pax={"GNU.sparse.map": pairs, "GNU.sparse.size": str(count * 4096)}
    )
    tar = raw_tar(("sparse", sparse))
    with small_disk(64 << 20) as disk:
        assert count * 4096 > 64 << 20
        with pytest.raises(ResourceExhausted, match="bytes are reserved for the node"):
            if store == "unpacked":
                unpack_bytes(tar, disk)
            else:
                write_index(disk, [tar])
        assert has_reserve(disk)


def test_a_layer_leaves_the_reserve_of_a_disk_that_other_layers_fill(tmp_path: Path) -> None:
    """CWE-400: a layer's limit is the space that is free at its start, which other layers may fill
    at the same time. Each store refuses the layer while the node's reserve is still free."""
    # The limit is far above the space that is left.
    content = random.Random(1).randbytes(20 << 20)
    tar = raw_tar(*((str(n), LayerFile(content)) for n in range(4)))
    (tmp_path / "blob").write_bytes(tar)
    for number in range(2):
        with small_disk(64 << 20) as disk, open(tmp_path / "blob", "rb") as blob:
            with pytest.raises(ResourceExhausted, match="bytes are reserved for the node"):
                if number:
                    unpack_bytes(tar, disk)
                else:
                    write_tar(TarStream(blob.fileno()), str(disk), digest_of(tar))
            assert has_reserve(disk)


def test_a_layer_leaves_a_reserve_of_inodes(tmp_path: Path) -> None:
    """CWE-400: empty files take no bytes, but could take the last inode of a node's disk. The layer
    is refused while a fiftieth of the inodes is free."""
    fd = open_mount("tmpfs", [("size", "256m"), ("nr_inodes", "4000")])
    try:
        disk = Path(f"/proc/self/fd/{fd}")
        with pytest.raises(
            ResourceExhausted, match=r"no inodes left on .*80 are reserved for the node"
        ):
            unpack_bytes(raw_tar(*((str(n), LayerFile()) for n in range(4500))), disk)
        assert os.fstatvfs(fd).f_favail > 4000 // 50
    finally:
        os.close(fd)


SPARSE_BYTES = 64 << 30


@contextmanager
def image_with_a_sparse_file(folder: Path, store: str) -> Iterator[Path]:
    """Provide the folder of an image's files: one sparse file of 64 GiB with only five bytes of
    data."""
    pairs = f"0,1,{SPARSE_BYTES // 2},2,{SPARSE_BYTES - 2},2"
    pax = {"GNU.sparse.map": pairs, "GNU.sparse.size": str(SPARSE_BYTES)}
    tar = raw_tar(("data", directory()), ("data/sparse", LayerFile(b"abcde", pax=pax)))
    if store == "unpacked":
        folder.mkdir()
        unpack_bytes(tar, folder)
        yield folder / "tree"
    else:
        with mounted(folder, [tar]) as root:
            yield root


@pytest.mark.parametrize("store", ["unpacked", "mounted"])
def test_a_sparse_file_below_a_volume_is_copied_sparsely(tmp_path: Path, store: str) -> None:
    """CWE-409: an image of 427 bytes has a sparse file of 64 GiB below a VOLUME. The copy for a
    container has its size and its data, and takes less than 4 MiB."""
    volume = MountRequest(api.Mount(container_path="/data"), "/data", str(tmp_path / "volumes/0"))
    with image_with_a_sparse_file(tmp_path / "image", store) as root:
        anonymous_volumes.fill([volume], [root], lambda: False)
    copy = tmp_path / "volumes/0/sparse"
    assert copy.stat().st_size == SPARSE_BYTES and copy.stat().st_blocks * 512 < 4 << 20
    with open(copy, "rb") as file:
        parts = [
            os.pread(file.fileno(), 3, at) for at in (0, SPARSE_BYTES // 2 - 1, SPARSE_BYTES - 3)
        ]
    assert parts == [b"a\0\0", b"\0bc", b"\0de"]


def test_copying_a_volume_ends_when_its_caller_gave_up(tmp_path: Path) -> None:
    """CWE-400: when the caller of CreateContainer has given up, copying a volume ends at the next
    file or MiB."""
    (tmp_path / "image/data").mkdir(parents=True)
    (tmp_path / "image/data/large").write_bytes(b"x" * (8 << 20))
    volume = MountRequest(api.Mount(container_path="/data"), "/data", str(tmp_path / "volumes/0"))
    calls = itertools.count()
    with pytest.raises(Abandoned):
        anonymous_volumes.fill([volume], [tmp_path / "image"], lambda: next(calls) >= 4)
    assert (tmp_path / "volumes/0/large").stat().st_size <= 3 << 20


def test_copying_a_volume_leaves_the_reserve_of_the_disk(tmp_path: Path) -> None:
    """CWE-400: the image's content at a VOLUME is copied for each container. The copy is refused
    while the node's reserve of disk space is still free."""
    (tmp_path / "image/data").mkdir(parents=True)
    (tmp_path / "image/data/large").write_bytes(b"x" * (80 << 20))
    with small_disk(64 << 20) as disk:
        volume = MountRequest(api.Mount(container_path="/data"), "/data", str(disk / "volumes/0"))
        with pytest.raises(ResourceExhausted, match="bytes are reserved for the node"):
            anonymous_volumes.fill([volume], [tmp_path / "image"], lambda: False)
        assert has_reserve(disk)


# ---- processes


def test_processes_that_work_on_layers_have_a_limit_of_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CWE-400: a layer may need endless work. A process that works on layers ends with an error at
    its limit of processor time."""
    monkeypatch.setattr(jail, "CPU_LIMIT_S", 1)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            jail.enter_decoder()
            while True:
                pass
        except ResourceExhausted as error:
            os.write(writing, error.message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert os.read(reading, 1000) == b"the layer's job took more than 1 s of processor time"
        assert os.waitpid(pid, 0) == (pid, 0)
    finally:
        os.close(reading)


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Let init reap jobs that end after their zygote, as it does for a server."""
    # A subreaper would get them.
    set_child_subreaper(False)
    yield
    set_child_subreaper(True)


INDEX = "cri_server.images.erofs.build:job"


@pytest.mark.usefixtures("no_orphans")
async def test_index_processes_are_limited_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CWE-770: a process of up to 768 MiB makes an image's index while its layers arrive, and a
    stalled registry would keep one for each pull. Only a limited number of them run at a time, and
    a complete image does not wait for stalled ones."""
    running, most = set[asyncio.Task[object]](), 0
    run = LayerJobs.run

    async def counted(self: LayerJobs, function: str, *rest: object) -> None:
        nonlocal most
        task = asyncio.current_task()
        assert task is not None
        if function == INDEX:
            running.add(task)
            most = max(most, len(running))
        try:
            await run(self, function, *rest)  # type: ignore[arg-type]
        finally:
            running.discard(task)

    monkeypatch.setattr(LayerJobs, "run", counted)
    monkeypatch.setitem(ImageService.__init__.__kwdefaults__ or {}, "store", "erofs")
    limit = turns.indexes_at_once(turns.memory_bytes(), os.cpu_count() or 2)
    small = build.image([build.layer({"small": b"x"})])
    with Registry(tmp_path / "registry") as registry:
        registry.push("small:1", small)
        for number in range(limit + 2):
            content = random.Random(number).randbytes(6 << 20)
            built = build.image([build.layer({"large": content})])
            registry.push(f"large:{number}", built)
            _, blobs = manifest_of(built)
            registry.fault(f"GET .*{max(blobs, key=lambda d: len(blobs[d]))}", stall_at=5 << 20)
        async with with_jobs(tmp_path) as service:
            pulls = [
                asyncio.create_task(service.pull(f"{registry.host}/large:{number}"))
                for number in range(limit + 2)
            ]
            async with asyncio.timeout(30):
                while len(running) < limit:
                    await asyncio.sleep(0.01)
            assert await service.pull(f"{registry.host}/small:1") == small.id
            assert most == limit and not any(pull.done() for pull in pulls)
            for pull in pulls:
                pull.cancel()
            await asyncio.wait(pulls)


async def test_a_lent_turn_is_taken_back_when_needed() -> None:
    """CWE-667: a task that only makes a pull faster borrows a turn (the right to run one more
    process) while one is free. When other work needs a turn, the task with the oldest borrowed turn
    is cancelled; other work never loses its turn."""
    free, watch = turns.Turns(2), Watch(10, "")
    begun: list[int] = []

    async def lend(number: int) -> None:
        async with free.borrow():
            begun.append(number)
            await asyncio.Event().wait()

    borrow = [asyncio.create_task(lend(number)) for number in range(2)]
    await asyncio.sleep(0)
    assert begun == [0, 1]
    with pytest.raises(turns.NoTurn):
        await lend(2)
    async with asyncio.timeout(10), free.hold(watch):
        assert borrow[0].cancelled() and not borrow[1].done()
        async with free.hold(watch):
            assert borrow[1].cancelled()
            waiting = asyncio.create_task(anext(aiter(_entered(free, watch))))
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])


async def _entered(free: turns.Turns, watch: Watch) -> AsyncIterator[None]:
    async with free.hold(watch):
        yield


def test_memory_of_all_processes_has_a_limit() -> None:
    """CWE-770: all processes that make indexes may use a quarter of the node's memory, those that
    decode streams half of it. One index and four streams are always allowed."""
    stream = jail.DECODER_MEMORY_LIMIT_BYTES + jail.TAR_MEMORY_LIMIT_BYTES
    for gib, processors in itertools.product((1, 2, 4, 8, 32, 512), (1, 2, 64)):
        memory = gib << 30
        indexes, streams = turns.indexes_at_once(memory, processors), turns.streams_at_once(memory)
        assert indexes == 1 or indexes * jail.MEMORY_LIMIT_BYTES <= memory // 4
        assert streams == 4 or streams * stream <= memory // 2
        assert 1 <= indexes <= max(2, processors) and 4 <= streams <= 16
