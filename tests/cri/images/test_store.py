"""Tests loading archives, removing images, and stores that are damaged, full or in use."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, docker_archive, image, layer
from cri_server.images.formats.digests import digest_of
from cri_server.images.model import Image
from cri_server.images.service import ImageService
from cri_server.images.store.catalog import Catalog, Content
from pyrunc.errors import Error, InvalidArgument, ResourceExhausted, WrongState
from tests.cri.images.conftest import only_erofs, only_unpacked, texts
from tests.cri.images.test_pull import left_over, make
from tests.cri.images.trees import names, snapshot
from tests.support import images
from tests.support.layer_threads import LayerThreads
from tests.support.oci_archives import oci_archive
from tests.support.registry import Registry, wait_for

pytestmark = pytest.mark.usefixtures("each_store")


def archive(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "archive.tar"
    path.write_bytes(data)
    return path


async def reopened(tmp_path: Path, **options: object) -> ImageService:
    """Start another image service on the same store, as after a restart; return it."""
    again = ImageService(tmp_path / "images", jobs=LayerThreads(), **options)  # type: ignore[arg-type]
    await again.start()
    OPENED.append(again)
    return again


OPENED: list[ImageService] = []


@pytest.fixture(autouse=True)
async def reopened_services_are_closed() -> AsyncIterator[None]:
    yield
    while OPENED:
        await OPENED.pop().close()


# ---- load


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", ["docker", "oci", "both"])
async def test_a_loaded_archive_keeps_its_names(
    tmp_path: Path, service: ImageService, kind: str, compress: bool
) -> None:
    one, two = make(1), make(2, layers=1)
    expected = {"docker.io/library/one:v1": one, "registry.example/two:v2": two}
    data = {"docker": docker_archive, "oci": oci_archive, "both": both}[kind](expected)
    loaded = await service.load(archive(tmp_path, gzip.compress(data, 1) if compress else data))
    assert {i.id: i.repo_tags for i in loaded} == {b.id: [n] for n, b in expected.items()}
    assert [i.id for i in await service.list("one:v1")] == [one.id]
    rootfs = await service.rootfs(one.id)
    assert texts(rootfs, "top") == (["2"] if rootfs.mount else ["2", "1", "0"])
    again = await reopened(tmp_path)
    assert sorted(await again.list(), key=lambda i: i.id) == sorted(loaded, key=lambda i: i.id)


def both(images: dict[str, BuiltImage]) -> bytes:
    """Return an archive like those of newer `docker save`: an OCI layout that has only the tags,
    and a manifest.json that has the full names."""
    import io
    import tarfile

    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(oci_archive(images))) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            files[member.name] = file.read()
    index = json.loads(files["index.json"])
    items = []
    for entry, (name, built) in zip(index["manifests"], images.items(), strict=True):
        entry["annotations"] = {"org.opencontainers.image.ref.name": name.rpartition(":")[2]}
        manifest = json.loads(files[f"blobs/sha256/{entry['digest'][7:]}"])
        paths = [f"blobs/sha256/{blob['digest'][7:]}" for blob in manifest["layers"]]
        items.append(
            {"Config": f"blobs/sha256/{built.id[7:]}", "RepoTags": [name], "Layers": paths}
        )
    files |= {"index.json": json.dumps(index).encode(), "manifest.json": json.dumps(items).encode()}
    return layer({name: build.LayerFile(data) for name, data in files.items()}, parents=False)


async def test_the_machines_busybox_is_loaded_with_all_programs(service: ImageService) -> None:
    [loaded] = await service.load(images.busybox())
    assert loaded.repo_tags == ["docker.io/library/busybox:latest"]
    rootfs = await service.rootfs(loaded.id)
    # for child processes as well
    root = Path(str(rootfs.lower_dirs[0]).replace("self", str(os.getpid())))
    listed = subprocess.run(
        ["/bin/busybox", "--list"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {p.name for p in (root / "bin").iterdir()} == {*listed, "busybox"}
    assert os.access(root / "bin/sh", os.X_OK) and (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    ran = subprocess.run(
        ["chroot", str(root), "/bin/sh", "-c", "id -u; grep -c root /etc/passwd"],
        capture_output=True,
        check=True,
    )
    assert ran.stdout == b"0\n1\n"
    assert build.busybox() == build.busybox(), "the same bytes each time"


async def test_an_image_without_a_name_is_listed_by_its_id(
    tmp_path: Path, service: ImageService
) -> None:
    built = make()
    [loaded] = await service.load(archive(tmp_path, oci_archive({"latest": built})))
    assert (loaded.id, loaded.repo_tags, loaded.repo_digests) == (built.id, [], [])
    [loaded] = await service.load(tmp_path / "archive.tar", "given/name:v1")
    assert loaded.repo_tags == ["docker.io/given/name:v1"]
    assert [i.id for i in await service.list()] == [built.id]


BAD_ARCHIVES = {
    "nothing": (b"", "neither index.json nor manifest.json"),
    "no archive": (b"just some text" * 100, "checksum|truncated"),
    "another tar": (layer({"a": "b"}), "neither index.json nor manifest.json"),
    "a manifest that is no JSON": (layer({"manifest.json": "{"}), "not JSON"),
    "a manifest of another kind": (layer({"manifest.json": "{}"}), "not a list"),
    "an entry without layers": (layer({"manifest.json": "[{}]"}), "not an image"),
    "a missing configuration": (
        layer({"manifest.json": '[{"Config":"c","Layers":[]}]'}),
        "is not in the archive",
    ),
    "a configuration outside": (
        layer({"manifest.json": '[{"Config":"../../../etc/passwd","Layers":[]}]'}),
        "is not in the archive",
    ),
    "a link in a circle": (
        layer(
            {
                "manifest.json": '[{"Config":"a","Layers":[]}]',
                "a": build.symlink("b"),
                "b": build.symlink("a"),
            }
        ),
        "is not in the archive",
    ),
    "a blob under another digest": (
        layer({f"blobs/sha256/{'0' * 64}": "x"}),
        "the content has the digest",
    ),
    "an empty index": (
        layer({"index.json": '{"schemaVersion":2,"manifests":[]}'}),
        "no image for this machine",
    ),
    "names that are none, in both forms": (
        layer(
            {
                "index.json": '{"schemaVersion":2,"manifests":[]}',
                "c": "{}",
                "manifest.json": '[{"Config":"c","RepoTags":5}]',
            }
        ),
        "RepoTags is not a list",
    ),
    "half": (docker_archive({"a:b": make()})[:300_000], "truncated"),
}


@pytest.mark.parametrize("case", BAD_ARCHIVES)
async def test_a_bad_archive_is_refused(tmp_path: Path, service: ImageService, case: str) -> None:
    data, words = BAD_ARCHIVES[case]
    with pytest.raises(InvalidArgument, match=words) as caught:
        await service.load(archive(tmp_path, data))
    assert "archive.tar: " in caught.value.message
    assert await service.list() == [] and left_over(tmp_path) == set()


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
async def test_a_job_decodes_an_archive(
    tmp_path: Path, job_service: ImageService, compress: Callable[[bytes], bytes]
) -> None:
    built = make()
    [loaded] = await job_service.load(archive(tmp_path, compress(docker_archive({"a:b": built}))))
    assert loaded.id == built.id
    await job_service.remove(built.id)
    for data, words in BAD_ARCHIVES.values():
        with pytest.raises(InvalidArgument, match=words) as caught:
            await job_service.load(archive(tmp_path, compress(data)))
        assert "archive.tar: " in caught.value.message
    with pytest.raises(Error, match="EISDIR"):
        await job_service.load(tmp_path)
    assert await job_service.list() == [] and left_over(tmp_path) == set()


async def test_a_load_cancelled_during_its_upload_ends(
    tmp_path: Path, job_service: ImageService
) -> None:
    data = docker_archive({"a:b": make(size=3_000_000)})
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR), "wb") as pipe:  # without waiting for a reader
        loading = asyncio.create_task(job_service.load(tmp_path / "pipe"))
        await asyncio.to_thread(pipe.write, data[: len(data) // 2])
        await asyncio.to_thread(pipe.flush)
        ingest = tmp_path / "images" / "ingest"
        assert await asyncio.to_thread(wait_for, lambda: any(ingest.iterdir()))
        loading.cancel()
        await asyncio.wait([loading], timeout=60)
    assert loading.cancelled()
    assert await asyncio.to_thread(wait_for, lambda: left_over(tmp_path) == set())
    assert await job_service.list() == []


async def test_a_missing_archive_is_an_error(tmp_path: Path, service: ImageService) -> None:
    with pytest.raises(Error, match="ENOENT"):
        await service.load(tmp_path / "nothing.tar")


async def test_an_archive_with_a_hostile_layer_is_refused(
    tmp_path: Path, service: ImageService
) -> None:
    built = image([layer({"../out": "x"}, parents=False)])
    with pytest.raises(Error, match=r"the name contains '\.\.'"):
        await service.load(archive(tmp_path, docker_archive({"a:b": built})))
    assert await service.list() == [] and left_over(tmp_path) == set()


# ---- remove


async def loaded(tmp_path: Path, service: ImageService, *tags: str) -> BuiltImage:
    built = make()
    for tag in tags:
        await service.load(archive(tmp_path, docker_archive({tag: built})))
    return built


@pytest.mark.requirement("13.4")
async def test_removing_a_name_leaves_the_others(tmp_path: Path, service: ImageService) -> None:
    built = await loaded(tmp_path, service, "a:1", "b:2")
    await service.remove("a:1")
    [listed] = await service.list()
    assert (listed.id, listed.repo_tags) == (built.id, ["docker.io/library/b:2"])
    assert (await service.rootfs(built.id)).lower_dirs[0].is_dir()
    await service.remove("a:1")
    await service.remove("b:2")
    assert await service.list() == []


@pytest.mark.requirement("5.4.1")
@pytest.mark.parametrize("way", ["{id}", "{hex}", "{short}"])
async def test_removing_an_id_removes_every_name_and_all_data(
    tmp_path: Path, service: ImageService, way: str
) -> None:
    built = await loaded(tmp_path, service, "a:1", "b:2")
    bare = built.id.removeprefix("sha256:")
    await service.remove(way.format(id=built.id, hex=bare, short=bare[:10]))
    assert await service.list() == [] and await service.status("b:2") is None
    await service.close()
    assert left_over(tmp_path) == set() and names(tmp_path / "images" / "trash") == set()


@pytest.mark.requirement("5.4.2")
async def test_five_concurrent_removals_of_a_missing_image_succeed(
    tmp_path: Path, service: ImageService
) -> None:
    built = await loaded(tmp_path, service, "a:1")
    await asyncio.gather(*(service.remove(built.id) for _ in range(5)))
    await asyncio.gather(
        *(service.remove("a:1") for _ in range(5)),
        service.remove("never:there"),
        service.remove("!"),
    )
    assert await service.list() == []


@only_unpacked
async def test_readers_see_the_images_before_or_after_a_change(
    tmp_path: Path, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the catalog adds an image, a lookup finds only the images from before."""
    seen: list[Image | None] = []
    compute = Catalog._layers_size

    def read_first(catalog: Catalog, content: Content) -> int:
        seen.extend(catalog.find(name) for name in ("a:1", "b:2"))
        return compute(catalog, content)

    monkeypatch.setattr(Catalog, "_layers_size", read_first)
    first = await loaded(tmp_path, service, "a:1")
    assert seen == [None, None]
    seen.clear()
    await loaded(tmp_path, service, "b:2")
    [before] = {image.repo_tags[0] for image in seen if image is not None}
    assert before == "docker.io/library/a:1" and seen[1] is None
    [after] = await service.list()
    assert after.id == first.id and len(after.repo_tags) == 2


@only_erofs
async def test_files_are_collected_while_another_thread_commits_a_file(
    tmp_path: Path, service: ImageService
) -> None:
    files = service._store.files
    committed = tmp_path / "committed"

    # the collection hashes each path in Python, where the interpreter may switch threads
    class Switching(type(tmp_path)):  # type: ignore[misc]
        def __hash__(self) -> int:
            if len(files._sizes) == 1:
                thread = threading.Thread(target=lambda: files._sizes.update({committed: 1}))
                thread.start()
                thread.join()
            return super().__hash__()

    files._sizes.update({Switching(tmp_path / "unused"): 1})
    files.collect(set(), set())
    assert list(files._sizes) == [committed]


@pytest.mark.requirement("5.4.3", "13.5")
async def test_an_image_in_use_is_not_removed(tmp_path: Path, service: ImageService) -> None:
    built = await loaded(tmp_path, service, "a:1", "b:2")
    service.in_use = lambda image_id: [f"web-{n}" for n in range(7)] if image_id == built.id else []
    await service.remove("a:1")  # it still has another name
    for way in ("b:2", built.id):
        with pytest.raises(
            WrongState, match="is in use by container web-0, web-1, web-2, web-3, web-4 and 2 more"
        ):
            await service.remove(way)
    assert len(await service.list()) == 1
    service.in_use = lambda image_id: []
    await service.remove("b:2")
    assert await service.list() == []


async def test_an_image_of_a_container_that_is_being_created_is_not_removed(
    tmp_path: Path, service: ImageService
) -> None:
    """The removal of an image fails while CreateContainer uses its layers."""
    # the container is not in the server's index yet
    built = await loaded(tmp_path, service, "a:1")
    rootfs = await service.rootfs(built.id, "web-0")
    with pytest.raises(WrongState, match="in use by a container that is being created"):
        await service.remove(built.id)
    assert all(folder.is_dir() for folder in rootfs.lower_dirs)
    service.release("web-0")
    await service.remove(built.id)
    assert await service.list() == []


async def test_shared_layers_stay_until_the_last_image_is_removed(
    tmp_path: Path, service: ImageService, each_store: str
) -> None:
    common = layer({"common": "x"})
    one, two = image([common, layer({"one": "1"})]), image([common, layer({"two": "2"})])
    await service.load(archive(tmp_path, docker_archive({"one:1": one, "two:2": two})))
    folder = tmp_path / "images" / ("layers" if each_store == "unpacked" else "tars")
    assert len(list(folder.iterdir())) == 3
    await service.remove("one:1")
    assert len(list(folder.iterdir())) == 2
    assert (await service.rootfs(two.id)).lower_dirs[-1].joinpath("common").read_text() == "x"
    await service.remove("two:2")
    assert list(folder.iterdir()) == []


async def test_removing_an_image_during_its_pull_leaves_a_complete_image_or_none(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make(layers=4)
    registry.push("app:v1", built)
    for _ in range(15):
        pull = asyncio.create_task(service.pull(f"{registry.host}/app:v1"))
        for _ in range(random.Random().randrange(12)):
            await asyncio.sleep(0.004)
            await service.remove(built.id)
        await pull
        if await service.status(built.id):
            assert texts(await service.rootfs(built.id), "top")[0] == "3"


@pytest.mark.requirement("5.2.2")
async def test_pinned_images_are_reported_as_pinned(tmp_path: Path) -> None:
    service = await reopened(tmp_path, pinned=["registry.k8s.io/pause:3.10"])
    await loaded(tmp_path, service, "registry.k8s.io/pause:3.10")
    assert [i.pinned for i in await service.list()] == [True]
    assert [i.pinned for i in await (await reopened(tmp_path)).list()] == [False]


async def test_the_usage_changes_with_loads_and_removals(
    tmp_path: Path, service: ImageService, each_store: str
) -> None:
    before = service.usage()
    await loaded(tmp_path, service, "a:1")
    after = service.usage()
    assert service.root == tmp_path / "images"
    least = 600_000 if each_store == "erofs" else 1_200_000  # the tar, or the blob and the files
    assert after.size_bytes - before.size_bytes > least and after.inodes > before.inodes
    assert (before.images, after.images) == (0, 1)
    [listed] = await service.list()
    assert after.size_bytes >= listed.size_bytes > 600_000
    await service.remove("a:1")
    assert service.usage() == before


# ---- damage


async def test_a_restart_finds_the_same_images(tmp_path: Path, service: ImageService) -> None:
    built = await loaded(tmp_path, service, "a:1", "b:2")
    before = await service.list()
    again = await reopened(tmp_path)
    assert await again.list() == before
    assert texts(await again.rootfs(built.id), "top") == texts(
        await service.rootfs(built.id), "top"
    )


async def test_leftovers_of_a_crash_are_removed(tmp_path: Path, service: ImageService) -> None:
    await loaded(tmp_path, service, "a:1")
    expected_files = left_over(tmp_path)
    store = tmp_path / "images"
    (store / "ingest/blob-1").write_bytes(b"half")
    (store / "ingest/layer-2/tree/deep/deeper").mkdir(parents=True)
    (store / "trash/old/tree").mkdir(parents=True)
    (store / "blobs/sha256" / ("1" * 64)).write_bytes(b"nobody's")
    (store / "layers" / ("2" * 64) / "tree").mkdir(parents=True)
    (store / "layers" / ("3" * 64)).write_bytes(b"no folder")
    (store / "tars" / ("4" * 64)).write_bytes(b"nobody's")
    (store / "indexes" / ("5" * 64)).write_bytes(b"nobody's")
    await (await reopened(tmp_path)).close()
    assert left_over(tmp_path) == expected_files and names(store / "trash") == set()


@pytest.mark.parametrize("how", ["gone", "empty", "cut", "flipped", "list", "null", "deep"])
@pytest.mark.parametrize(
    "which", [("index.json",), ("names.json",), ("index.json", "names.json")], ids="+".join
)
async def test_a_damaged_index_is_repaired(
    tmp_path: Path, service: ImageService, which: tuple[str, ...], how: str
) -> None:
    """A damaged index is restored from its copy, with all names. If the copy is damaged, too, the
    images stay, without names."""
    built = await loaded(tmp_path, service, "a:1")
    for name in which:
        path = tmp_path / "images" / name
        data = path.read_bytes()
        damaged = {
            "gone": None,
            "empty": b"",
            "cut": data[: len(data) // 2],
            "flipped": data.replace(b"sha256", b"sha257"),
            "list": b"[]",
            "null": b'{"manifests": null}',
            "deep": b"[" * 200_000,
        }[how]
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
    again = await reopened(tmp_path)
    [listed] = await again.list()
    assert listed.id == built.id and (
        len(which) == 2 or listed.repo_tags == ["docker.io/library/a:1"]
    )
    assert (await again.rootfs(built.id)).lower_dirs[0].is_dir()
    assert json.loads((tmp_path / "images/index.json").read_text())["manifests"]


@only_unpacked
@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
async def test_only_the_damaged_image_is_dropped(
    tmp_path: Path, service: ImageService, what: str
) -> None:
    good, bad = make(1), make(2, layers=1)
    await service.load(archive(tmp_path, docker_archive({"good:1": good, "bad:1": bad})))
    [target] = [n for n in service._store.catalog._state.names if n.repository.endswith("bad")]
    digest = {
        "manifest": target.target.digest,
        "config": bad.id,
        "layer": digest_of(bad.layers[0]),
    }[what]
    path = tmp_path / "images/blobs/sha256" / digest.removeprefix("sha256:")
    path.write_bytes(path.read_bytes()[:-10])
    again = await reopened(tmp_path)
    assert [i.id for i in await again.list()] == [good.id]
    await again.load(tmp_path / "archive.tar")
    assert len(await again.list()) == 2


@pytest.mark.parametrize("what", ["manifest", "config", "layer", "record", "verity"])
async def test_a_file_that_the_disk_cannot_read_damages_one_image(
    tmp_path: Path, service: ImageService, each_store: str, what: str
) -> None:
    good, bad = make(1), make(2, layers=1)
    await service.load(archive(tmp_path, docker_archive({"good:1": good, "bad:1": bad})))
    store = tmp_path / "images"
    [target] = [n for n in service._store.catalog._state.names if n.repository.endswith("bad")]
    [diff_id] = service._store.catalog.content(bad.id).diff_ids
    name = diff_id.removeprefix("sha256:")
    path = {
        "manifest": Path(service._store.blobs.path(target.target.digest)),
        "config": Path(service._store.blobs.path(bad.id)),
        "layer": Path(service._store.blobs.path(digest_of(bad.layers[0]))),
        "record": store / "layers" / name / "layer.json",
        "verity": store / "verity" / f"tars-{name}",
    }[what]
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(path)  # stands for an unreadable sector: stat(2) and open(2) fail with ELOOP
    again = await reopened(tmp_path)
    assert good.id in [i.id for i in await again.list()]
    await again.load(tmp_path / "archive.tar")
    assert len(await again.list()) == 2
    assert texts(await again.rootfs(bad.id), "top")


@only_unpacked
@pytest.mark.parametrize("what", ["manifest", "layer"])
async def test_layers_that_a_container_uses_outlive_their_damaged_image(
    tmp_path: Path, service: ImageService, what: str
) -> None:
    built = await loaded(tmp_path, service, "a:1")
    content = service._store.catalog.content(built.id)
    [name] = service._store.catalog.names_of(built.id)
    digest = name.target.digest if what == "manifest" else content.manifest.layers[0].digest
    Path(service._store.blobs.path(digest)).write_bytes(b"")
    roots = (await service.rootfs(built.id)).lower_dirs
    before = [snapshot(root) for root in roots]
    for _ in range(2):
        again = await reopened(
            tmp_path, in_use=lambda image_id: ["web"] if image_id == built.id else []
        )
        assert await again.list() == [] and [snapshot(root) for root in roots] == before
    await reopened(tmp_path)
    assert not any(root.exists() for root in roots)


@only_unpacked
@pytest.mark.parametrize("what", ["one record", "one layer", "all layers"])
async def test_lost_layers_are_unpacked_again(
    tmp_path: Path, service: ImageService, what: str
) -> None:
    built = await loaded(tmp_path, service, "a:1", "b:2")
    before, roots = await service.list(), (await service.rootfs(built.id)).lower_dirs
    trees = [snapshot(root) for root in roots]
    if what == "one record":
        (roots[1].parent / "layer.json").write_text("{")
    else:
        for root in roots if what == "all layers" else roots[:1]:
            shutil.rmtree(root.parent)
    again = await reopened(tmp_path)
    assert await again.list() == before
    assert [snapshot(root) for root in (await again.rootfs(built.id)).lower_dirs] == trees


async def test_a_cancelled_load_leaves_nothing(tmp_path: Path, service: ImageService) -> None:
    path = archive(
        tmp_path, docker_archive({f"a{n}:1": make(n, size=3_000_000) for n in range(12)})
    )
    loading = asyncio.create_task(service.load(path))
    ingest = tmp_path / "images" / "ingest"
    assert await asyncio.to_thread(wait_for, lambda: any(ingest.iterdir()))
    loading.cancel()
    await asyncio.wait([loading], timeout=60)
    assert loading.cancelled() and await service.list() == [] and left_over(tmp_path) == set()


async def test_random_damage_never_stops_the_service(tmp_path: Path, service: ImageService) -> None:
    await loaded(tmp_path, service, "a:1")
    index, chance = tmp_path / "images/index.json", random.Random(11)
    copies = {
        name: (tmp_path / "images" / name).read_bytes() for name in ("index.json", "names.json")
    }
    for _ in range(60):
        for name, data in copies.items():
            changed = bytearray(data)
            for _ in range(chance.randrange(1, 6)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            (tmp_path / "images" / name).write_bytes(
                changed[: chance.randrange(1, len(changed) + 1)]
            )
        again = await reopened(tmp_path)
        assert len(await again.list()) <= 1 and index.exists()
        for leftover in (tmp_path / "images").glob("*.damaged-*"):
            leftover.unlink()
        if not await again.list():
            await again.load(tmp_path / "archive.tar")


# ---- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 6 MiB and 400 inodes; yield its folder."""
    folder = tmp_path / "images"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,nr_inodes=400", "tmpfs", str(folder)], check=True
    )
    yield folder
    # the files that a mount has used are closed a moment after it is gone
    assert wait_for(lambda: subprocess.run(["umount", str(folder)], check=False).returncode == 0)


@pytest.mark.parametrize("what", ["bytes", "inodes"])
async def test_images_outlive_a_start_on_a_full_disk(
    tmp_path: Path,
    registry: Registry,
    small_disk: Path,
    what: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When the disk has no space or inodes left, a starting server keeps its images and can remove
    them."""
    built = make(layers=1, size=1_000_000)
    registry.push("app:v1", built)
    service = ImageService(small_disk, store="auto", jobs=LayerThreads())
    await service.start()
    await service.pull(f"{registry.host}/app:v1")
    before = (await service.rootfs(built.id)).mount is not None
    await service.close()
    with contextlib.suppress(OSError):
        for number in range(1000 if what == "inodes" else 1):
            (small_disk / f"blobs/filler-{number}").write_bytes(
                b"" if what == "inodes" else bytes(8 << 20)
            )
    service = ImageService(small_disk, store="auto", jobs=LayerThreads())
    await service.start()
    assert [listed.id for listed in await service.list()] == [built.id]
    root = await service.rootfs(built.id)
    assert (root.mount is not None) == before and (root.lower_dirs[0] / "top").read_text() == "0"
    assert not before or f"no {'inodes' if what == 'inodes' else 'space'} left" in caplog.text
    await service.remove(built.id)
    assert await service.list() == []
    await service.close()


TOO_BIG = pytest.mark.parametrize(
    ("built", "what"),
    [
        (make(3, layers=1, size=8_000_000), "no space"),
        (image([layer({"file": b"x" * 8_000_000})]), "no space"),
        (image([layer({f"f{n}": "x" for n in range(600)})]), "no inodes"),
    ],
    ids=["the blob does not fit", "the files do not fit", "too many files"],
)


@TOO_BIG
async def test_a_full_disk_is_an_error_that_leaves_nothing(
    tmp_path: Path,
    registry: Registry,
    small_disk: Path,
    built: BuiltImage,
    what: str,
    each_store: str,
) -> None:
    if what == "no inodes" and each_store == "erofs":
        return  # a layer takes one, whatever is in it
    service = await reopened(tmp_path)
    good = make(1, layers=1, size=100_000)
    registry.push("good:1", good)
    registry.push("big:1", built)
    await service.pull(f"{registry.host}/good:1")
    expected_files = snapshot(small_disk, times=False)
    with pytest.raises(ResourceExhausted, match=f"{what} left on the file system of {small_disk}"):
        await service.pull(f"{registry.host}/big:1")
    assert [i.id for i in await service.list()] == [good.id]
    assert snapshot(small_disk, times=False) == expected_files
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    await service.remove(good.id)
    assert await service.list() == [] and await (await reopened(tmp_path)).list() == []
    await service.close()


@TOO_BIG
@pytest.mark.parametrize("packed", [False, True])
async def test_the_error_of_a_full_disk_names_the_file_system(
    tmp_path: Path, small_disk: Path, built: BuiltImage, what: str, packed: bool, each_store: str
) -> None:
    if what == "no inodes" and each_store == "erofs":
        return  # a layer takes one, whatever is in it
    service = await reopened(tmp_path)
    data = docker_archive({"a.example/b:c": built})
    path = archive(tmp_path, gzip.compress(data, 1) if packed else data)
    with pytest.raises(
        ResourceExhausted, match=f"{what} left on the file system of {small_disk}"
    ) as caught:
        await service.load(path)
    assert "limit of a layer" not in caught.value.message
    assert await service.list() == [] and list((small_disk / "ingest").iterdir()) == []
    for number in range(400):
        try:
            (small_disk / f"inode-{number}").touch()
        except OSError:
            break
    with pytest.raises(
        ResourceExhausted, match=f"no inodes left on the file system of {small_disk}"
    ):
        await service.load(path)
    await service.close()


async def test_an_archive_may_have_an_image_for_another_machine(
    tmp_path: Path, service: ImageService, caplog: pytest.LogCaptureFixture
) -> None:
    built = image([], architecture="s390x")
    [loaded] = await service.load(archive(tmp_path, docker_archive({"a:b": built})))
    assert loaded.id == built.id
    assert any(
        "the image is for linux/s390x, this machine is linux/" in r.getMessage()
        for r in caplog.records
    )
