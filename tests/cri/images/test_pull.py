"""Tests pulls over HTTP and HTTPS: stored content, mirrors, logins, proxies, cancellation."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from cri_server.images.archives.build import BuiltImage, LayerFile, image, layer
from cri_server.images.formats import manifest as types
from cri_server.images.formats.digests import digest_of
from cri_server.images.model import Auth, Progress
from cri_server.images.service import ImageService
from cri_server.images.store.unpacked_layers import Layers
from cri_server.images.waiting import in_thread
from pyrunc.errors import Error, NotFound, PeerError
from tests.cri.images import taken_over
from tests.cri.images.conftest import only_unpacked, texts, with_jobs
from tests.cri.images.test_hostile import device, hardlink
from tests.cri.images.test_unpack import make_everything, raw_tar
from tests.cri.images.trees import names, snapshot
from tests.support.layer_threads import LayerThreads
from tests.support.registry import Registry, wait_for
from tests.support.socks import SocksProxy

pytestmark = pytest.mark.usefixtures("each_store")


def make(seed: int = 0, layers: int = 3, size: int = 200_000, **config: object) -> BuiltImage:
    """Return an image of random data: `layers` layers of `size` bytes each."""
    chance = random.Random(seed)
    tars = [layer({f"layer-{n}": chance.randbytes(size), "top": f"{n}"}) for n in range(layers)]
    return image(tars, {"Cmd": ["/layer-0"], **config})


def hosts_toml(tmp_path: Path, domain: str, text: str) -> None:
    """Write `text` to the configuration of registry `domain`, certs.d/DOMAIN/hosts.toml."""
    folder = tmp_path / "certs.d" / domain
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts.toml").write_text(text)


def left_over(tmp_path: Path) -> set[str]:
    """Return the names of all blobs, layers and temporary files in the store."""
    store = tmp_path / "images"
    return {
        n
        for part in ("blobs/sha256", "layers", "tars", "indexes", "ingest")
        for n in names(store / part)
    }


@pytest.mark.requirement("5.3.2")
@pytest.mark.parametrize("docker", [False, True])
@pytest.mark.parametrize("compress", ["gzip", "zstd", ""])
async def test_a_pull_stores_a_complete_image(
    tmp_path: Path, registry: Registry, service: ImageService, docker: bool, compress: str
) -> None:
    built = make(User="1002:7")
    digest = registry.push("team/app:v1", built, compress=compress, docker=docker)
    name = f"{registry.host}/team/app"
    seen: list[Progress] = []
    assert await service.pull(f"{name}:v1", progress=seen.append) == built.id
    [listed] = await service.list()
    assert (listed.id, listed.repo_tags, listed.repo_digests) == (
        built.id,
        [f"{name}:v1"],
        [f"{name}@{digest}"],
    )
    assert listed.size_bytes > 600_000 and (listed.uid, listed.username) == (1002, "")
    rootfs = await service.rootfs(built.id)
    assert rootfs.config.cmd == ["/layer-0"]
    assert texts(rootfs, "top") == (["2"] if rootfs.mount else ["2", "1", "0"])
    assert seen[0].stage == "resolving" and seen[-1].stage == "done"
    assert seen[-1].fetched_bytes == seen[-1].total_bytes > 600_000


@pytest.mark.requirement("5.2.1")
async def test_an_image_is_found_by_each_of_its_names(
    registry: Registry, service: ImageService
) -> None:
    built = make()
    digest = registry.push("app:v1", built)
    name = f"{registry.host}/app"
    await service.pull(f"{name}:v1")
    bare = built.id.removeprefix("sha256:")
    for way in (
        f"{name}:v1",
        f"{name}@{digest}",
        f"{name}:other@{digest}",
        built.id,
        bare,
        bare[:12],
        built.id[:20],
    ):
        status = await service.status(way)
        assert status is not None and status.id == built.id, way
        assert [i.id for i in await service.list(way)] == [built.id]
    for way in (
        "",
        "nothing",
        f"{name}:v2",
        f"{name}@sha256:{'0' * 64}",
        "0" * 64,
        "not a reference",
        "sha256:",
    ):
        assert await service.status(way) is None, way
    assert (await service.list("nothing")) == []


@only_unpacked
async def test_the_layout_follows_the_image_specification(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    import hashlib

    digest = registry.push("app:v1", make())
    await service.pull(f"{registry.host}/app:v1")
    store = tmp_path / "images"
    assert json.loads((store / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((store / "index.json").read_text())
    [entry] = index["manifests"]
    assert index["schemaVersion"] == 2 and entry["digest"] == digest
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == f"{registry.host}/app:v1"
    manifest = json.loads((store / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())
    for blob in [entry, manifest["config"], *manifest["layers"]]:
        data = (store / "blobs/sha256" / blob["digest"].removeprefix("sha256:")).read_bytes()
        assert (len(data), f"sha256:{hashlib.sha256(data).hexdigest()}") == (
            blob["size"],
            blob["digest"],
        )


@pytest.mark.requirement("5.1.1", "5.3.2")
async def test_a_pull_by_digest_has_no_tag(registry: Registry, service: ImageService) -> None:
    digest = registry.push("app:v1", make())
    name = f"{registry.host}/app"
    await service.pull(f"{name}:v7@{digest}")
    [listed] = await service.list()
    assert (listed.repo_tags, listed.repo_digests) == ([], [f"{name}@{digest}"])


@pytest.mark.requirement("5.1.5")
async def test_a_tag_that_moves_leaves_the_old_image_its_digest(
    registry: Registry, service: ImageService
) -> None:
    name = f"{registry.host}/app"
    old, new = make(1), make(2)
    old_digest = registry.push("app:v1", old)
    await service.pull(f"{name}:v1")
    new_digest = registry.push("app:v1", new)
    assert await service.pull(f"{name}:v1") == new.id
    by_id = {i.id: i for i in await service.list()}
    assert (by_id[old.id].repo_tags, by_id[old.id].repo_digests) == ([], [f"{name}@{old_digest}"])
    assert (by_id[new.id].repo_tags, by_id[new.id].repo_digests) == (
        [f"{name}:v1"],
        [f"{name}@{new_digest}"],
    )


@pytest.mark.requirement("5.3.1")
async def test_three_tags_of_a_digest_belong_to_the_same_image(
    registry: Registry, service: ImageService
) -> None:
    built = make()
    name = f"{registry.host}/app"
    for tag in "abc":
        registry.push(f"app:{tag}", built)
        await service.pull(f"{name}:{tag}")
    [listed] = await service.list()
    assert listed.repo_tags == [f"{name}:{tag}" for tag in "abc"] and len(listed.repo_digests) == 1


@pytest.mark.requirement("5.1.1")
@pytest.mark.parametrize("docker", [False, True])
async def test_the_image_of_an_index_for_this_machine_is_pulled(
    registry: Registry, service: ImageService, docker: bool
) -> None:
    mine = types.host_platform().architecture
    right, wrong = make(1), make(2)
    platforms = {
        ("linux", "s390x", ""): wrong,
        ("windows", mine, ""): wrong,
        ("linux", mine, ""): right,
    }
    digest = registry.push_index("app:v1", platforms, docker=docker)
    assert await service.pull(f"{registry.host}/app:v1") == right.id
    [listed] = await service.list()
    assert listed.repo_digests == [f"{registry.host}/app@{digest}"]
    await service.remove(listed.id)
    registry.push_index("app:v2", {("linux", "s390x", ""): wrong})
    with pytest.raises(NotFound, match=r"no image for linux/.*; available: linux/s390x"):
        await service.pull(f"{registry.host}/app:v2")


@pytest.mark.parametrize("where", ["alone", "by its digest", "an index that says it fits"])
async def test_an_image_for_another_machine_is_pulled_with_a_warning(
    registry: Registry, service: ImageService, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    # The user chose the image: binfmt_misc runs it, or only its configuration is wrong, as in
    # influxdb's arm64/v8 (official-images 16859), Cilium 1.17's arm64 (AgentBaker 8815), dotnet's
    # arm (dotnet-docker 454).
    foreign = image([layer({"top": "a"})], architecture="arm", variant="v6")
    name, digest = f"{registry.host}/app:v1", registry.push("app:v1", foreign)
    if where == "by its digest":
        name = f"{registry.host}/app@{digest}"
    elif where == "an index that says it fits":
        push_for_this_machine(registry, foreign)
    assert await service.pull(name) == foreign.id
    [record] = [r for r in caplog.records if r.levelname == "WARNING"]
    assert (
        f"pulling {name}: the image is for linux/arm/v6, this machine is linux/"
        in record.getMessage()
    )
    assert texts(await service.rootfs(foreign.id), "top") == ["a"]


async def test_an_image_for_another_operating_system_is_refused(
    registry: Registry, service: ImageService
) -> None:
    registry.push("app:v1", image([layer({"a": "a"})], os="windows"))
    with pytest.raises(NotFound, match="the image is for windows/"):
        await service.pull(f"{registry.host}/app:v1")
    assert await service.list() == []


async def test_the_best_variant_is_pulled_and_found_again(
    tmp_path: Path, registry: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the processor changes, the stored variant is still listed, although a new pull chooses
    another one."""
    choices = {
        ("linux", "amd64", ""): make(1),
        ("linux", "amd64", "v2"): make(2),
        ("linux", "amd64", "v4"): make(4),
    }
    registry.push_index("app:v1", choices)
    name = f"{registry.host}/app:v1"
    for processor, expected in ((("v3", "v2", ""), 2), (("",), 1), (("v4", "v3", "v2", ""), 4)):
        host = tuple(("amd64", variant) for variant in processor)
        monkeypatch.setattr(
            "cri_server.images.formats.manifest.host_processors", lambda host=host: host
        )
        [before] = [i.id for i in await service.list()] or [""]
        again = await reopened(service, tmp_path)
        assert [i.id for i in await again.list()] == ([before] if before else [])
        assert await again.pull(name) == make(expected).id
        await again.remove(before)
        await again.close()
        service = await reopened(again, tmp_path)
    await service.close()


async def reopened(service: ImageService, tmp_path: Path) -> ImageService:
    await service.close()
    again = ImageService(tmp_path / "images", jobs=LayerThreads())
    await again.start()
    return again


# ---- what is shared


@pytest.mark.requirement("5.1.4")
async def test_concurrent_equal_pulls_share_the_work(
    registry: Registry, service: ImageService
) -> None:
    built = make()
    registry.push("app:v1", built)
    ids = await asyncio.gather(*(service.pull(f"{registry.host}/app:v1") for _ in range(50)))
    assert set(ids) == {built.id} and len(registry.requests) == 5


async def test_different_pulls_fetch_a_common_layer_once(
    registry: Registry, service: ImageService
) -> None:
    common = layer({"common": random.Random(1).randbytes(2_000_000)})
    for number in range(8):
        registry.push(
            f"app:{number}", image([common, layer({"own": str(number)})], {"Cmd": [str(number)]})
        )
    await asyncio.gather(*(service.pull(f"{registry.host}/app:{n}") for n in range(8)))
    blobs = [r.path for r in registry.requested("GET /v2/app/blobs/")]
    assert len(blobs) == len(set(blobs)) == 8 + 8 + 1
    assert len(await service.list()) == 8
    chains = [service._store.catalog.content(i.id).chain for i in await service.list()]
    assert len({chain[0] for chain in chains}) == 1 and len({chain[1] for chain in chains}) == 8


async def test_an_image_may_have_the_same_layer_twice(
    registry: Registry, service: ImageService
) -> None:
    same = layer({"same": "x"})
    built = image([same, layer({"other": "y"}), same])
    registry.push("app:v1", built)
    await service.pull(f"{registry.host}/app:v1")
    rootfs = await service.rootfs(built.id)
    assert len(set(rootfs.lower_dirs)) == (1 if rootfs.mount else 3)
    assert names(rootfs.lower_dirs[0]) == ({"same", "other"} if rootfs.mount else {"same"})


def paths_of(registry: Registry) -> list[str]:
    """Return the requests to repository `app` since the last call, as "METHOD PATH"."""
    requests = [f"{r.method} {r.path.removeprefix('/v2/app/')}" for r in registry.requests]
    registry.requests.clear()
    return requests


@pytest.mark.parametrize("kind", ["manifest", "index"])
@pytest.mark.parametrize("by", ["tag", "digest"])
async def test_a_pull_of_a_stored_image_fetches_only_the_configuration(
    registry: Registry, service: ImageService, kind: str, by: str
) -> None:
    # Docker Hub counts each GET of a manifest, two for an index; a HEAD is free.
    built = make()
    digest = (
        push_for_this_machine(registry, built)
        if kind == "index"
        else registry.push("app:v1", built)
    )
    target = "v1" if by == "tag" else digest
    name = f"{registry.host}/app{':' if by == 'tag' else '@'}{target}"
    assert await service.pull(name) == built.id
    assert [r for r in paths_of(registry) if r.startswith("HEAD")] == []
    before = await service.list()
    assert await service.pull(name) == built.id
    assert paths_of(registry) == [f"HEAD manifests/{target}", f"GET blobs/{built.id}"]
    assert await service.list() == before


def push_for_this_machine(registry: Registry, built: BuiltImage) -> str:
    platform = types.host_platform()
    return registry.push_index("app:v1", {(platform.os, platform.architecture, ""): built})


async def test_only_changed_blobs_are_fetched(registry: Registry, service: ImageService) -> None:
    """When an index gets an entry for another platform, only the index and the configuration are
    fetched. When the tag moves, the new image is fetched."""
    built = make()
    push_for_this_machine(registry, built)
    name = f"{registry.host}/app:v1"
    await service.pull(name)
    paths_of(registry)
    platform = types.host_platform()
    moved = registry.push_index(
        "app:v1", {("plan9", "386", ""): make(7), (platform.os, platform.architecture, ""): built}
    )
    await service.pull(name)
    assert paths_of(registry) == ["HEAD manifests/v1", "GET manifests/v1", f"GET blobs/{built.id}"]
    [listed] = await service.list()
    assert f"{registry.host}/app@{moved}" in listed.repo_digests
    newer = make(8, layers=1)
    registry.push("app:v1", newer)
    assert await service.pull(name) == newer.id
    assert paths_of(registry)[:3] == [
        "HEAD manifests/v1",
        "GET manifests/v1",
        f"GET blobs/{newer.id}",
    ]


HEADS = {
    "distribution, Harbor, Quay, GHCR, Docker Hub": ({}, False),
    "registry.access.redhat.com: no Docker-Content-Digest": (
        {"headers": {"Docker-Content-Digest": ""}},
        True,
    ),
    "no digest of ours": ({"headers": {"Docker-Content-Digest": "sha512:" + "0" * 128}}, True),
    "the digest of another platform's manifest": (
        {"headers": {"Docker-Content-Digest": "sha256:" + "0" * 64}},
        True,
    ),
    "registry.centos.org: HEAD is 403": ({"status": 403}, True),
    "HEAD is 404": ({"status": 404}, True),
    "HEAD is 405": ({"status": 405}, True),
    "HEAD is 400": ({"status": 400}, True),
    "HEAD is 501": ({"status": 501}, True),
    "HEAD is 503": ({"status": 503}, True),
    "HEAD is 429": ({"status": 429}, True),
}
"""What registries answer to HEAD of a manifest, and whether a GET follows. Found in
distribution-spec 207, containerd 3238, 6684 and its resolver, regclient 363, watchtower 667."""


@pytest.mark.parametrize("registries", HEADS)
async def test_a_registry_without_head_requests_is_supported(
    registry: Registry, service: ImageService, registries: str
) -> None:
    fault, is_fetched = HEADS[registries]
    built = make(layers=1)
    registry.push("app:v1", built)
    await service.pull(f"{registry.host}/app:v1")
    paths_of(registry)
    if fault:
        registry.fault("HEAD .*/manifests/", **fault)
    assert await service.pull(f"{registry.host}/app:v1") == built.id
    fetched = ["GET manifests/v1"] if is_fetched else []
    assert paths_of(registry) == ["HEAD manifests/v1", *fetched, f"GET blobs/{built.id}"]


async def test_a_damaged_stored_manifest_is_fetched_again(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make(layers=1)
    digest = registry.push("app:v1", built)
    name = f"{registry.host}/app:v1"
    await service.pull(name)
    paths_of(registry)
    (tmp_path / "images/blobs/sha256" / digest.removeprefix("sha256:")).unlink()
    assert await service.pull(name) == built.id
    assert paths_of(registry) == ["HEAD manifests/v1", "GET manifests/v1", f"GET blobs/{built.id}"]
    assert (tmp_path / "images/blobs/sha256" / digest.removeprefix("sha256:")).exists()


@pytest.mark.parametrize("scheme", ["basic", "bearer"])
async def test_a_head_request_is_authenticated(
    tmp_path: Path, service: ImageService, scheme: str
) -> None:
    with Registry(tmp_path / "locked", auth=(scheme, "user", "secret")) as locked:
        built = make(layers=1)
        locked.push("app:v1", built)
        for _ in range(2):
            paths_of(locked)
            await service.pull(f"{locked.host}/app:v1", Auth(username="user", password="secret"))
        requests = [request for request in paths_of(locked) if "/token" not in request]
        assert requests == ["HEAD manifests/v1", "HEAD manifests/v1", f"GET blobs/{built.id}"]
        with pytest.raises(PeerError, match=r"unauthorized|token server"):
            await service.pull(f"{locked.host}/app:v1", Auth(username="user", password="wrong"))


async def test_a_layer_in_another_compression_is_fetched_once(
    tmp_path: Path, registry: Registry, service: ImageService, each_store: str
) -> None:
    """When two other images have a stored gzip layer as zstd, the zstd blob is fetched once, even
    if the server restarts, and the stored layer is not replaced."""
    # only decoding the second image's blob shows that it is the stored layer
    common = layer({"common": random.Random(3).randbytes(100_000)})
    for repository, compress in (("first", "gzip"), ("second", "zstd"), ("third", "zstd")):
        registry.push(f"{repository}:v1", image([common], {"Cmd": [repository]}), compress=compress)
    identity = set()
    fetched = {}
    for repository in ("first", "second", "third"):
        registry.requests.clear()
        image_id = await service.pull(f"{registry.host}/{repository}:v1")
        fetched[repository] = len(registry.requested("/blobs/")) - 1
        [path] = (tmp_path / "images" / ("tars" if each_store == "erofs" else "layers")).iterdir()
        identity.add(path.stat().st_ino)
        await service.close()
        service = ImageService(tmp_path / "images", jobs=LayerThreads())
        await service.start()
    assert fetched == {"first": 1, "second": 1, "third": 0} and len(identity) == 1
    assert (await service.rootfs(image_id)).config.cmd == ["third"]
    assert names(tmp_path / "images/ingest") == set()
    await service.close()


async def test_an_image_without_layers_has_an_empty_root(
    registry: Registry, service: ImageService
) -> None:
    built = image([])
    registry.push("app:v1", built)
    await service.pull(f"{registry.host}/app:v1")
    [root] = (await service.rootfs(built.id)).lower_dirs
    assert names(root) == set()


async def test_a_cancelled_pull_leaves_nothing(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    registry.push("app:v1", make(size=500_000))
    registry.fault("/blobs/", stall_at=100_000)
    pulls = [asyncio.create_task(service.pull(f"{registry.host}/app:v1")) for _ in range(2)]
    assert await asyncio.to_thread(wait_for, lambda: len(registry.requested("/blobs/")) >= 1)
    pulls[0].cancel()
    await asyncio.wait([pulls[0]])
    assert not pulls[1].done(), "another caller still waits for it"
    pulls[1].cancel()
    await asyncio.wait([pulls[1]], timeout=60)
    assert pulls[1].cancelled() and await service.list() == [] and left_over(tmp_path) == set()


@pytest.mark.parametrize("turns", range(1, 4))
async def test_a_pull_continues_when_its_caller_disconnects(
    tmp_path: Path, registry: Registry, service: ImageService, turns: int
) -> None:
    """A second caller, which comes soon after the first one disconnected, gets the same pull."""
    # kubelet repeats a call at once
    built = make(size=500_000)
    registry.push("app:v1", built)
    registry.fault("/blobs/", stall_at=100_000, times=1)
    first = asyncio.create_task(service.pull(f"{registry.host}/app:v1"))
    assert await asyncio.to_thread(wait_for, lambda: len(registry.requested("/blobs/")) >= 1)
    first.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await service.pull(f"{registry.host}/app:v1") == built.id
    with pytest.raises(asyncio.CancelledError):
        await first
    await service.remove(f"{registry.host}/app:v1")
    await service.close()
    assert left_over(tmp_path) == set()


async def test_content_under_deletion_is_not_used_by_a_pull(
    tmp_path: Path, service: ImageService
) -> None:
    """A pull that begins while the store deletes an unused blob waits, then does not find it."""
    store = service._store
    digest = store.blobs.put(b"rubbish")
    deleting, go_on = threading.Event(), threading.Event()
    remove = store.blobs.remove

    def slow(name: str) -> None:
        deleting.set()
        go_on.wait(30)
        remove(name)

    store.blobs.remove = slow  # type: ignore[method-assign]
    collecting = asyncio.create_task(store.collect())
    await asyncio.to_thread(deleting.wait, 30)

    async def begin() -> int | None:
        async with store.holding([digest]):
            return store.blobs.size(digest)

    beginning = asyncio.create_task(begin())
    await asyncio.wait([beginning], timeout=0.2)
    go_on.set()
    assert await beginning is None
    await collecting


async def test_a_cancelled_unpack_leaves_nothing(
    tmp_path: Path, registry: Registry, job_service: ImageService, each_store: str
) -> None:
    many = layer({f"folder-{n % 50}/file-{n}": str(n) for n in range(30_000)})
    registry.push("app:v1", image([many]))
    pull = asyncio.create_task(job_service.pull(f"{registry.host}/app:v1"))
    ingest = tmp_path / "images" / "ingest"
    begun = "layer-*/tree/folder-9" if each_store == "unpacked" else "layer-*/tar"
    assert await asyncio.to_thread(wait_for, lambda: any(ingest.glob(begun)), 60)
    pull.cancel()
    await asyncio.wait([pull], timeout=60)
    assert pull.cancelled() and left_over(tmp_path) == set()


@only_unpacked
async def test_a_cancelled_unpack_waits_for_its_commit(
    tmp_path: Path, registry: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull that is cancelled while a layer is committed ends only after the commit."""
    # Else the layer's folder would be deleted while it is renamed into the store, and the next pull
    # would use the emptied layer.
    abort, _ = in_thread.__defaults__ or ()
    monkeypatch.setattr(in_thread, "__defaults__", (abort, 0.1))
    registry.push("app:v1", make())
    reached, released = asyncio.Event(), threading.Event()
    loop, commit = asyncio.get_running_loop(), Layers.commit

    def late(layers: Layers, folder: str, chain: Sequence[str]) -> None:
        loop.call_soon_threadsafe(reached.set)
        assert released.wait(60)
        commit(layers, folder, chain)

    monkeypatch.setattr(Layers, "commit", late)
    pull = asyncio.create_task(service.pull(f"{registry.host}/app:v1"))
    await asyncio.wait_for(reached.wait(), 60)
    pull.cancel()
    await asyncio.wait([pull], timeout=1)
    assert not pull.done() and list((tmp_path / "images/ingest").glob("layer-*/tree/top"))
    released.set()
    await asyncio.wait([pull], timeout=60)
    assert pull.cancelled() and left_over(tmp_path) == set()


@pytest.mark.parametrize("compress", ["gzip", "zstd", ""])
async def test_layers_are_unpacked_in_jobs(
    registry: Registry, job_service: ImageService, compress: str
) -> None:
    built = make(layers=6)
    registry.push("app:v1", built, compress=compress)
    assert await job_service.pull(f"{registry.host}/app:v1") == built.id
    rootfs = await job_service.rootfs(built.id)
    assert texts(rootfs, "top") == (["5"] if rootfs.mount else list("543210"))


@only_unpacked
async def test_a_job_gives_the_same_tree_as_a_thread(
    tmp_path: Path, registry: Registry, job_service: ImageService
) -> None:
    # a job may not make device nodes itself
    make_everything(tmp_path / "everything")
    pack = [
        "tar",
        "-C",
        str(tmp_path / "everything"),
        "--format=posix",
        "--xattrs",
        "--xattrs-include=*",
        "-c",
        ".",
    ]
    tar = subprocess.run(pack, check=True, capture_output=True).stdout
    more = raw_tar(
        ("gone", device(1, 5)),
        ("gone", LayerFile(b"a file")),
        ("d", device(7, 7, b"4")),
        ("e", hardlink("d")),
    )
    built = image([tar, more])
    registry.push("app:v1", built)
    await job_service.pull(f"{registry.host}/app:v1")
    top, bottom = (await job_service.rootfs(built.id)).lower_dirs
    assert snapshot(bottom) == snapshot(tmp_path / "everything")
    tree = snapshot(top)
    assert (tree[b"gone"].kind, tree[b"d"].kind, tree[b"d"].device) == (
        "-",
        "b",
        os.makedev(7, 7),
    )
    assert tree[b"e"].device == os.makedev(7, 7)


async def test_the_error_of_a_job_gives_the_reason(
    tmp_path: Path, registry: Registry, job_service: ImageService
) -> None:
    registry.push("app:v1", image([layer({"a": "a"}), layer({"../b": "b"}, parents=False)]))
    with pytest.raises(PeerError, match=r"'\.\./b': the name contains '\.\.'"):
        await job_service.pull(f"{registry.host}/app:v1")
    assert left_over(tmp_path) == set()


@pytest.fixture
async def deceived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[ImageService]:
    """Provide an image service whose decoders misbehave as in taken_over.py."""
    monkeypatch.setenv(taken_over.LIE, request.param)
    async with with_jobs(tmp_path, "tests.cri.images.taken_over") as running:
        yield running


@pytest.mark.parametrize("deceived", taken_over.LIES, indirect=True)
async def test_a_compromised_decoder_cannot_change_a_layer(
    tmp_path: Path, registry: Registry, deceived: ImageService
) -> None:
    """CVE class: code execution in an inflate library. When a decoder changes, adds
    or omits content, or dies, the pull fails and the store keeps nothing of the layer."""
    registry.push("app:v1", image([layer({"file": "right" * 1000})]))
    with pytest.raises(PeerError, match=r"the layer's content is|truncated|a layer job failed"):
        await deceived.pull(f"{registry.host}/app:v1")
    assert await deceived.list() == [] and left_over(tmp_path) == set()


@pytest.mark.parametrize("deceived", ["stay"], indirect=True)
async def test_a_pull_with_a_compromised_decoder_stores_the_right_files(
    registry: Registry, deceived: ImageService
) -> None:
    built = image([layer({"file": "right"})])
    registry.push("app:v1", built)
    assert await deceived.pull(f"{registry.host}/app:v1") == built.id
    assert texts(await deceived.rootfs(built.id), "file") == ["right"]


# ---- mirrors


@pytest.mark.requirement("5.1.1")
async def test_short_names_are_pulled_from_docker_io_and_its_mirror(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make()
    registry.push("library/busybox:latest", built)
    hosts_toml(tmp_path, "docker.io", f'server = "{registry.url}"\n')
    await service.pull("busybox")
    [listed] = await service.list()
    assert listed.repo_tags == ["docker.io/library/busybox:latest"]
    for way in (
        "busybox",
        "busybox:latest",
        "library/busybox",
        "docker.io/busybox",
        "index.docker.io/library/busybox",
    ):
        assert await service.status(way) == listed


async def test_mirrors_are_tried_in_order(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """When a mirror is down, lacks the image, may not resolve tags or breaks off, the next one is
    tried, and at last the registry itself."""
    built = make()
    registry.push("app:v1", built)
    with (
        Registry(tmp_path / "empty") as empty,
        Registry(tmp_path / "half") as half,
        Registry(tmp_path / "no") as no,
    ):
        half.push("app:v1", built)
        half.fault("/blobs/", cut_at=1000)
        no.push("app:v1", make(9))
        hosts_toml(
            tmp_path,
            "registry.example",
            f'server = "{registry.url}"\n'
            '[host."http://127.0.0.1:9"]\n'
            f'[host."{empty.url}"]\n'
            f'[host."{no.url}"]\ncapabilities = ["pull"]\n'
            f'[host."{half.url}"]\n',
        )
        assert await service.pull("registry.example/app:v1") == built.id
        assert (
            empty.requested("manifests")
            and half.requested("manifests")
            and not no.requested("manifests/v1")
        )
        assert all("ns=registry.example" in r.path for r in half.requests)
        # `server` is a place other than registry.example, so that it hears the registry's name,
        # too.
        assert all(
            "ns=registry.example" in r.path for r in registry.requests
        ) and registry.requested("/blobs/")
        assert any(r.headers.get("range") for r in registry.requests), "what a mirror sent is kept"


async def test_wrong_bytes_of_a_mirror_are_fetched_again_from_the_registry(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """When a mirror sends wrong bytes and breaks off, the whole blob is at last fetched from the
    registry."""
    built = make(layers=1)
    registry.push("app:v1", built, compress="")
    [tar] = built.layers
    with Registry(tmp_path / "bad") as bad:
        bad.push("app:v1", built, compress="")
        bad.fault(digest_of(tar), content=bytes(len(tar)), cut_at=50_000)
        hosts_toml(tmp_path, "registry.example", f'server = "{registry.url}"\n[host."{bad.url}"]\n')
        assert await service.pull("registry.example/app:v1") == built.id
    ranges = [r.headers.get("range") for r in registry.requested(digest_of(tar))]
    # what was decoded cannot be taken back: that is found out twice
    assert ranges[0] == "bytes=100000-" and ranges[-1] is None


async def test_path_and_headers_of_a_host_come_from_hosts_toml(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    registry.push("cached/app:v1", make())
    hosts_toml(
        tmp_path,
        "registry.example",
        f'[host."{registry.url}/v2/cached"]\noverride_path ='
        f' true\n[host."{registry.url}/v2/cached".header]\nX-Ours = ["a", "b"]\n',
    )
    await service.pull("registry.example/app:v1")
    assert {r.headers.get("x-ours") for r in registry.requests} == {"a, b"}


async def test_an_error_names_a_broken_hosts_toml(tmp_path: Path, service: ImageService) -> None:
    hosts_toml(tmp_path, "registry.example", '[host."https://a"]\ncapabilities = "pull"\n')
    with pytest.raises(Error, match=r"hosts\.toml:host\.'https://a': .*capabilities"):
        await service.pull("registry.example/app:v1")


async def test_a_host_of_the_default_file_gets_the_name_of_the_registry(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """When certs.d/_default sends all pulls to one host, requests carry the name of the image's
    registry as `ns`."""
    registry.push("app:v1", make())
    hosts_toml(tmp_path, "_default", f'server = "{registry.url}"\n')
    await service.pull("Registry.example:443/app:v1")
    assert {parse_qs(urlsplit(r.path).query)["ns"][0] for r in registry.requests} == {
        "registry.example"
    }
    registry.requests.clear()
    await service.pull(f"{registry.host}/app:v1")
    assert registry.requests and not any("ns=" in r.path for r in registry.requests)


async def test_a_mirror_with_an_unreadable_certificate_is_skipped(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make()
    registry.push("app:v1", built)
    mirror = '[host."https://mirror.example"]\nca = "absent.pem"\n'
    hosts_toml(tmp_path, "registry.example", f'server = "{registry.url}"\n{mirror}')
    assert await service.pull("registry.example/app:v1") == built.id
    for key, name in (("ca", "absent.pem"), ("client", "absent.crt"), ("client", "empty.pem")):
        folder = tmp_path / "certs.d" / "registry.example"
        (folder / "empty.pem").touch()
        hosts_toml(
            tmp_path, "registry.example", f'server = "https://registry.example"\n{key} = "{name}"\n'
        )
        with pytest.raises(
            Error, match=rf"hosts\.toml of registry\.example: {folder / name} cannot be used"
        ):
            await service.pull("registry.example/app:v1")


# ---- logins


SECRETS = {
    "user and password": Auth(username="u", password="s3cret-w0rd"),
    "auth": Auth(auth=base64.b64encode(b"u:s3cret-w0rd").decode()),
    "identity token": Auth(identity_token="s3cret-w0rd"),
}


@pytest.mark.requirement("5.1.2")
@pytest.mark.parametrize("scheme", ["basic", "bearer"])
@pytest.mark.parametrize("way", SECRETS)
async def test_a_registry_gets_the_login_of_the_pull(
    tmp_path: Path, service: ImageService, scheme: str, way: str
) -> None:
    with Registry(tmp_path / "locked", auth=(scheme, "u", "s3cret-w0rd")) as locked:
        built = make()
        locked.push("app:v1", built)
        name = f"{locked.host}/app:v1"
        for wrong in (None, Auth(username="u", password="wr0ng-w0rd")):
            with pytest.raises(PeerError, match="401") as refused:
                await service.pull(name, wrong)
            assert "w0rd" not in str(refused.value)
        if scheme == "basic" and way == "identity token":
            return
        assert await service.pull(name, SECRETS[way]) == built.id
        if scheme == "bearer":
            assert (
                len({r.headers.get("authorization") for r in locked.requested("/blobs/")}) == 1
            ), "one token for all"


@pytest.mark.requirement("5.1.2")
async def test_a_registry_token_is_sent_unchanged(tmp_path: Path, service: ImageService) -> None:
    with Registry(tmp_path / "locked", auth=("bearer", "u", "p")) as locked:
        locked.push("app:v1", make())
        locked.tokens.add("made-elsewhere")
        await service.pull(f"{locked.host}/app:v1", Auth(registry_token="made-elsewhere"))
        assert not locked.requested("/token")
        with pytest.raises(Error, match="characters that a header cannot carry") as refused:
            await service.pull(
                f"{locked.host}/app:v1", Auth(registry_token="made\r\nX-Bad: elsewhere")
            )
        assert "elsewhere" not in str(refused.value)


async def test_a_token_that_expires_during_a_pull_is_renewed(
    tmp_path: Path, service: ImageService
) -> None:
    with Registry(tmp_path / "locked", auth=("bearer", "u", "p")) as locked:
        built = make(layers=1, size=1_000_000)
        locked.push("app:v1", built)
        locked.fault("/blobs/", times=2, cut_at=300_000)
        pull = asyncio.create_task(service.pull(f"{locked.host}/app:v1", Auth("u", "p")))
        assert await asyncio.to_thread(wait_for, lambda: bool(locked.requested("/blobs/")))
        locked.tokens.clear()
        assert await pull == built.id and len(locked.requested("/token")) >= 2


@pytest.mark.requirement("5.1.2")
@pytest.mark.parametrize(
    ("address", "used"),
    [
        ("", True),
        ("{host}", True),
        ("http://{host}/v2/", True),
        ("https://elsewhere.example", False),
        ("docker.io", False),
    ],
)
async def test_a_secret_for_another_server_is_not_used(
    tmp_path: Path, service: ImageService, address: str, used: bool
) -> None:
    with Registry(tmp_path / "locked", auth=("basic", "u", "p")) as locked:
        locked.push("app:v1", make())
        auth = Auth("u", "p", server_address=address.format(host=locked.host))
        try:
            await service.pull(f"{locked.host}/app:v1", auth)
        except PeerError:
            assert not used and not any("authorization" in r.headers for r in locked.requests)
        else:
            assert used


@pytest.mark.parametrize(
    ("folder", "table", "address", "sent"),
    [
        ("registry.example", "", "", True),
        ("registry.example", "", "registry.example", True),
        ("registry.example", "", "other.example", False),
        ("registry.example", "pull_secrets = false", "", False),
        ("registry.example", "pull_secrets = false", "MIRROR", True),
        ("_default", "", "", False),
        ("_default", "", "MIRROR", True),
    ],
)
async def test_a_mirror_gets_the_secret_only_if_the_registrys_own_file_names_the_mirror(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    folder: str,
    table: str,
    address: str,
    sent: bool,
) -> None:
    built = make()
    registry.push("app:v1", built)
    with Registry(tmp_path / "mirror", auth=("basic", "u", "p")) as mirror:
        mirror.push("app:v1", built)
        hosts_toml(tmp_path, folder, f'server = "{registry.url}"\n[host."{mirror.url}"]\n{table}\n')
        auth = Auth("u", "p", server_address=address.replace("MIRROR", mirror.host))
        await service.pull("registry.example/app:v1", auth)
        assert any("authorization" in r.headers for r in mirror.requests) == sent
    assert not any("authorization" in r.headers for r in registry.requests)


async def test_a_mirror_gets_rewritten_names_and_the_administrators_login(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = make()
    with Registry(tmp_path / "mirror", auth=("basic", "admin", "own")) as mirror:
        mirror.push("all/team/app:v1", built)
        hosts_toml(
            tmp_path,
            "registry.example",
            f'server = "{registry.url}"\n[host."{mirror.url}"]\nrewrite = {{ "^team/(.*)" ='
            f' "all/team/$1" }}\n[host."{mirror.url}".auth]\nusername = "admin"\npassword ='
            ' "own"\n',
        )
        await service.pull("registry.example/team/app:v1")
        [listed] = await service.list()
        assert listed.repo_tags == ["registry.example/team/app:v1"]
        assert not registry.requests


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Make a certificate for 127.0.0.1; return its path and that of its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test",
    ]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *command, *files, *name], check=True, capture_output=True)
    yield folder / "cert.pem", folder / "key.pem"


@only_unpacked
async def test_a_private_ca_without_key_usage_is_accepted(
    tmp_path: Path, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *" ".join(arguments).split()], cwd=tmp_path, check=True, capture_output=True
        )

    new = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj"
    openssl("req -x509 -days 2 -out ca.pem -keyout ca.key", new, "/CN=ca")
    openssl("req -out request.pem -keyout key.pem", new, "/CN=test")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl(
        "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2"
        " -extfile names -out cert.pem"
    )
    default = ssl.create_default_context

    # Python's default from 3.13 on, which refuses such a CA
    def strict() -> ssl.SSLContext:
        context = default()
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    with Registry(tmp_path / "tls", tls=(tmp_path / "cert.pem", tmp_path / "key.pem")) as secure:
        built = make()
        secure.push("app:v1", built)
        hosts_toml(tmp_path, secure.host, f'server = "{secure.url}"\nca = ["{tmp_path}/ca.pem"]\n')
        assert await service.pull(f"{secure.host}/app:v1") == built.id


@pytest.mark.parametrize("how", ["ca", "skip_verify", "crt"])
async def test_a_pull_over_https_checks_the_certificate(
    tmp_path: Path, service: ImageService, certificates: tuple[Path, Path], how: str
) -> None:
    with Registry(tmp_path / "tls", tls=certificates) as secure:
        built = make()
        secure.push("app:v1", built)
        folder = tmp_path / "certs.d" / secure.host
        hosts_toml(tmp_path, secure.host, f'server = "{secure.url}"\n')
        with pytest.raises(PeerError, match=r"RegistryUnavailable: .*TLS: self-signed certificate"):
            await service.pull(f"{secure.host}/app:v1")
        if how == "ca":
            (folder / "our-ca.pem").write_bytes(certificates[0].read_bytes())
            hosts_toml(tmp_path, secure.host, f'server = "{secure.url}"\nca = "our-ca.pem"\n')
        elif how == "skip_verify":
            hosts_toml(tmp_path, secure.host, f'[host."{secure.url}"]\nskip_verify = true\n')
        else:
            hosts_toml(tmp_path, "registry.example", "")
            hosts_toml(
                tmp_path, secure.host, f'server = "{secure.url}"\nca = ["{certificates[0]}"]\n'
            )
        assert await service.pull(f"{secure.host}/app:v1") == built.id


# ---- proxies


async def test_the_proxy_of_hosts_toml_is_used(
    tmp_path: Path, registry: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy in hosts.toml overrides the environment's HTTP_PROXY and NO_PROXY."""
    registry.push("app:v1", make())
    text = f'server = "http://registry.example"\nproxy = "{registry.url}"\n'
    hosts_toml(tmp_path, "registry.example", text)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "registry.example")
    registry.answers_for = "http://registry.example"
    await service.pull("registry.example/app:v1")
    hosts_toml(
        tmp_path,
        "registry.example",
        'server = "http://registry.example"\nproxy = "http://127.0.0.1:9"\n',
    )
    with pytest.raises(
        PeerError, match=r"registry\.example through the proxy http://127\.0\.0\.1:9: "
    ):
        await service.pull("registry.example/app:v1")


@pytest.mark.parametrize("login", [None, ("me", "p@ss")])
async def test_a_socks_proxy_resolves_the_name(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    monkeypatch: pytest.MonkeyPatch,
    login: tuple[str, str] | None,
) -> None:
    """The proxy, not the server, resolves the registry's name for socks5:// and socks5h://. When
    the login is wrong, the error names the proxy."""
    # as in Go
    registry.push("app:v1", make())
    hosts_toml(tmp_path, "registry.example", 'server = "http://registry.example"\n')
    host, _, port = registry.host.rpartition(":")
    with SocksProxy((host, int(port)), login) as proxy:
        user = f"{login[0]}:{quote(login[1])}@" if login else ""
        monkeypatch.setenv("http_proxy", f"socks5://{user}{proxy.host}")
        await service.pull("registry.example/app:v1")
        assert set(proxy.targets) == {("registry.example", 80)}
        if login:
            monkeypatch.setenv("http_proxy", f"socks5h://me:wrong@{proxy.host}")
            with pytest.raises(
                PeerError, match=rf"through the proxy socks5h://{proxy.host}: "
            ) as caught:
                await service.pull("registry.example/app:v1")
            assert "wrong" not in caught.value.message


@pytest.mark.parametrize("bypass", [False, True])
async def test_the_proxy_of_the_environment_is_used(
    tmp_path: Path,
    registry: Registry,
    service: ImageService,
    monkeypatch: pytest.MonkeyPatch,
    bypass: bool,
) -> None:
    """HTTP_PROXY gets the requests, except those to hosts in NO_PROXY."""
    built = make()
    registry.push("app:v1", built)
    hosts_toml(tmp_path, "registry.example", 'server = "http://registry.example"\n')
    monkeypatch.setenv("http_proxy", registry.url)
    monkeypatch.setenv("no_proxy", "registry.example" if bypass else "elsewhere.example")
    registry.answers_for = "http://registry.example"
    if bypass:
        with pytest.raises(PeerError, match=r"registry\.example does not resolve"):
            await service.pull("registry.example/app:v1")
        assert registry.requests == []
    else:
        assert await service.pull("registry.example/app:v1") == built.id
