"""Tests the image store after SIGKILL, power cuts and failed system calls: every listed image is
complete, and nothing else is left."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cri_server.images.archives.build import BuiltImage, image, layer
from cri_server.images.service import ImageService
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import JOB_MODULES
from cri_server.zygote.client import Zygote
from pyrunc.errors import PeerError
from tests.cri.images import ended_jobs
from tests.cri.images.ended_jobs import EXIT_CODE, Changes
from tests.cri.images.puller import JOBS
from tests.cri.images.trees import names
from tests.support.layer_threads import LayerThreads
from tests.support.registry import Registry
from tests.support.zygotes import start_zygote

pytestmark = pytest.mark.usefixtures("each_store")

ROOT = Path(__file__).parents[3]


def two_images() -> dict[str, BuiltImage]:
    """Return a dict: name -> image, of two images with a common base and 250 small files each."""
    chance = random.Random(8)
    base = layer({f"base/{n}": chance.randbytes(chance.randrange(9000)) for n in range(150)})
    tops = [
        layer({f"top/{n}": chance.randbytes(chance.randrange(9000)) for n in range(100)})
        for _ in range(2)
    ]
    return {f"app:{n}": image([base, tops[n]]) for n in range(2)}


def push_all(registry: Registry, images: dict[str, BuiltImage]) -> list[str]:
    """Push the images; return their references."""
    for name, built in images.items():
        registry.push(name, built)
    return [f"{registry.host}/{name}" for name in images]


PULLER = (sys.executable, "-m", "tests.cri.images.puller")


@contextmanager
def pulling(store: Path, registry: Registry) -> Iterator[subprocess.Popen[bytes]]:
    """Run puller.py on the store during a `with` block; yield its process."""
    command = [*PULLER, str(store), f"{registry.host}/app:0", f"{registry.host}/app:1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None and program.stdout.readline() == b"ready\n"
        yield program
        program.kill()


async def check(store: Path, built: dict[str, BuiltImage]) -> int:
    """Assert that every listed image is complete and that nothing else is in the store; return the
    number of images."""
    service = ImageService(store, jobs=LayerThreads())
    mounts = ImageService.__init__.__kwdefaults__["store"] == "erofs"  # type: ignore[index]
    await service.start()
    by_id = {b.id: b for b in built.values()}
    listed = await service.list()
    blobs, layers, tars = set[str](), set[str](), set[str]()
    for listed_image in listed:
        rootfs = await service.rootfs(listed_image.id)
        layer_contents = [content(tar) for tar in by_id[listed_image.id].layers]
        assert bool(rootfs.mount) == mounts
        if mounts:
            layer_contents = [
                {name: data for files in layer_contents for name, data in files.items()}
            ]
        for tree, expected in zip(reversed(rootfs.lower_dirs), layer_contents, strict=True):
            files = {
                str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()
            }
            assert files == expected, f"{tree} is not what its layer has"
            layers.add(tree.parent.name)
        image_content = service._store.catalog.content(listed_image.id)
        blobs |= set(image_content.blobs)
        tars |= {digest.removeprefix("sha256:") for digest in image_content.diff_ids}
    assert {f"sha256:{n}" for n in names(store / "blobs/sha256")} == blobs | {
        n.target.digest for n in service._store.catalog._state.names
    }
    assert names(store / "tars") == (tars if mounts else set()) and names(store / "ingest") == set()
    assert len(names(store / "indexes")) == (len(listed) if mounts else 0)
    assert {p.name for p in (store / "layers").iterdir()} == (set() if mounts else layers)
    await service.close()
    return len(listed)


def content(tar: bytes) -> dict[str, bytes]:
    """Return a dict: name -> content, of the regular files in a tar."""
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(tar)) as members:
        return {m.name: members.extractfile(m).read() for m in members if m.isreg()}  # type: ignore[union-attr]


async def kill_often(tmp_path: Path, registry: Registry, rounds: int) -> set[int]:
    """Kill a pulling program `rounds` times; return the numbers of images left each time."""
    built = two_images()
    push_all(registry, built)
    chance, listed = random.Random(), set()
    for number in range(rounds):
        with pulling(tmp_path / "images", registry) as program:
            assert program.stdout is not None
            for _ in range(number % 8):
                program.stdout.readline()
            time.sleep(chance.random() * 0.15)
        listed.add(await check(tmp_path / "images", built))
    return listed


async def test_the_store_is_whole_after_a_kill_at_any_moment(
    tmp_path: Path, registry: Registry
) -> None:
    await kill_often(tmp_path, registry, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_store_is_whole_after_kills_at_many_moments(
    tmp_path: Path, registry: Registry
) -> None:
    assert len(await kill_often(tmp_path, registry, 200)) > 1, "every kill hit the same moment"


def small_images() -> dict[str, BuiltImage]:
    """Return a dict: name -> image, of two images with a common base and 4 files each."""
    base, *tops = (
        layer({f"{name}/{n}": f"{name} {n}" * 9 for n in range(2)}) for name in ("base", "a", "b")
    )
    return {f"app:{n}": image([base, top]) for n, top in enumerate(tops)}


async def kill_at_steps(tmp_path: Path, registry: Registry, every: int) -> set[int]:
    """Run the same pulls and removals in new stores: the first run is killed before its first
    change to a file, each further run `every` changes later. Return the numbers of images left."""
    built, listed = small_images(), set()
    references = push_all(registry, built)
    for number in range(1, 10_000, every):
        store = tmp_path / f"store-{number}"
        done = subprocess.run(
            [*PULLER, "steps", str(number), str(store), *references],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL), f"change {number}: {done.stderr.decode()}"
        listed.add(await check(store, built))
        shutil.rmtree(store)
        if not done.returncode:
            assert int(done.stdout) < number
            return listed
    raise AssertionError("no run ends by itself")


@pytest.fixture(params=["threads", "jobs"])
def each_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with layers unpacked by threads, and by zygote jobs."""
    # Jobs outlive the killed process, and write to folders that the next one deletes.
    if request.param == "jobs":
        monkeypatch.setenv(JOBS, "yes")


async def test_the_store_is_whole_after_a_kill_before_some_changes(
    tmp_path: Path, registry: Registry, each_place: None
) -> None:
    await kill_at_steps(tmp_path, registry, 25)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_store_is_whole_after_a_kill_before_every_change(
    tmp_path: Path, registry: Registry, each_place: None
) -> None:
    assert {0, 1, 2} == await kill_at_steps(tmp_path, registry, 1)


async def end_jobs(
    tmp_path: Path, registry: Registry, changes: Changes, jobs: Zygote, every: int
) -> int:
    """Pull two images again and again: in the first round a job ends before its first change to a
    file, in each further round `every` changes later. Return the number of failed pulls."""
    built, failed = small_images(), 0
    references = push_all(registry, built)
    service = ImageService(tmp_path / "images", jobs=LayerJobs(jobs))
    await service.start()
    for number in range(1, 10_000, every):
        changes.end_at(number)
        results = await asyncio.gather(*map(service.pull, references), return_exceptions=True)
        counted = changes.count()
        changes.end_at(0)
        for result in results:
            # or the pull made the layer again
            if isinstance(result, BaseException):
                failed += 1
                assert (
                    isinstance(result, PeerError) and f"exit code {EXIT_CODE}" in result.message
                ), result
        listed = {image.id for image in await service.list()}
        assert listed == {result for result in results if isinstance(result, str)}
        await service._store.wait_deleted()
        assert names(tmp_path / "images/ingest") == set(), f"change {number}"
        for reference in references:
            await service.pull(reference)
        await service.close()
        assert await check(tmp_path / "images", built) == len(built)
        service = ImageService(tmp_path / "images", jobs=LayerJobs(jobs))
        await service.start()
        for one in built.values():
            await service.remove(one.id)
        if counted < number:
            await service.close()
            return failed
    raise AssertionError("no run ends by itself")


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setenv(ended_jobs.FILE, str(tmp_path / "changes"))
    return Changes(tmp_path / "changes")


@pytest.fixture
async def counting_jobs(changes: Changes) -> AsyncIterator[Zygote]:
    zygote = await start_zygote((*JOB_MODULES, "tests.cri.images.ended_jobs"))
    yield zygote
    await zygote.close()


async def test_the_store_is_whole_when_jobs_end_before_some_changes(
    tmp_path: Path, registry: Registry, changes: Changes, counting_jobs: Zygote
) -> None:
    assert await end_jobs(tmp_path, registry, changes, counting_jobs, 12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_store_is_whole_when_jobs_end_before_every_change(
    tmp_path: Path, registry: Registry, changes: Changes, counting_jobs: Zygote
) -> None:
    assert await end_jobs(tmp_path, registry, changes, counting_jobs, 1)


WORDS = {"ENOSPC": "no space left", "EDQUOT": "the disk quota"}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (call, e)
            for call in ("fsync", "rename", "mkdir", "pwrite64", "unlink")
            for e in ("EIO", "ENOSPC")
        ),
        ("pwrite64", "EDQUOT"),
    ],
)
async def test_a_failed_system_call_is_an_error_and_leaves_the_store_whole(
    tmp_path: Path, registry: Registry, call: str, error: str
) -> None:
    """When the disk or the quota is full, the error says so and names the store's directory."""
    built = two_images()
    push_all(registry, built)
    ended = set()
    for number in (1, 2, 3, 5):  # the call of the program that fails
        inject = f"inject={call}:error={error}:when={number}"
        strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
        program = [*PULLER, "once", str(tmp_path / "images"), f"{registry.host}/app:0"]
        done = subprocess.run(
            [*strace, *program], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        ended.add(done.stdout.split()[0])
        if error in WORDS and done.stdout != "ok\n":
            assert f"{WORDS[error]} on the file system of {tmp_path}/images" in done.stdout
        await check(tmp_path / "images", built)
    assert ended <= {"ok", "kernel", "resource_exhausted"}


# ---- power


@contextmanager
def mounted(disk: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def cut_power_often(tmp_path: Path, registry: Registry, cuts: int) -> None:
    """Pull images onto a disk, and check `cuts` copies of it, each made at a random moment."""
    # a machine finds such a copy after a power cut
    built = two_images()
    push_all(registry, built)
    disk, copy, chance = tmp_path / "disk", tmp_path / "copy", random.Random()
    with open(disk, "wb") as file:
        file.truncate(96 << 20)
    subprocess.run(
        ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(disk)], check=True
    )
    outcomes = set()
    with mounted(disk, tmp_path / "live") as live, pulling(live / "images", registry) as program:
        for _ in range(cuts):
            time.sleep(chance.random() * 0.6)
            program.send_signal(signal.SIGSTOP)  # so that the copy is of one moment
            shutil.copyfile(disk, copy)
            program.send_signal(signal.SIGCONT)
            subprocess.run(["e2fsck", "-fy", str(copy)], check=False, capture_output=True)
            with mounted(copy, tmp_path / "after") as after:
                outcomes.add(await check(after / "images", built))
    assert outcomes


async def test_the_store_is_whole_after_a_power_cut_at_any_moment(
    tmp_path: Path, registry: Registry
) -> None:
    await cut_power_often(tmp_path, registry, 5)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_store_is_whole_after_power_cuts_at_many_moments(
    tmp_path: Path, registry: Registry
) -> None:
    await cut_power_often(tmp_path, registry, 60)
