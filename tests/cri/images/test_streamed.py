"""Tests layers that are decompressed while their blob is downloaded: failures have the same result
as if the download came first."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cri_server.images.archives.build import image, layer
from cri_server.images.erofs.tar_file import Growth, TarFile
from cri_server.images.layers.inflate import BadLayer
from cri_server.images.layers.ring import Interrupted, Receiver
from cri_server.images.layers.streamed import streamed
from cri_server.images.layers.tar_headers import members, skip
from cri_server.images.service import ImageService
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import JOB_MODULES
from pyrunc.errors import ResourceExhausted
from tests.cri.images.test_pull import left_over
from tests.support.layer_threads import LayerThreads
from tests.support.processes import wait_until
from tests.support.registry import Registry
from tests.support.zygotes import start_zygote


@pytest.fixture(params=["threads", "jobs"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ImageService]:
    """Provide an image service that mounts images and decompresses layers in threads or jobs."""
    zygote = await start_zygote(JOB_MODULES) if request.param == "jobs" else None
    jobs = LayerJobs(zygote) if zygote else LayerThreads()
    image_service = ImageService(
        tmp_path / "images", jobs=jobs, store="erofs", no_progress_timeout_s=20.0
    )
    await image_service.start()
    yield image_service
    await image_service.close()
    if zygote:
        await zygote.close()


async def test_the_tar_grows_while_the_blob_arrives(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    built = image([layer({"file": os.urandom(6_000_000)})])
    registry.push("app:v1", built, compress="")
    registry.fault(hashlib.sha256(built.layers[0]).hexdigest(), stall_at=5_000_000)
    pull = asyncio.create_task(service.pull(f"{registry.host}/app:v1"))
    ingest = tmp_path / "images/ingest"

    def grown() -> bool:
        return any(tar.stat().st_size > 1_000_000 for tar in ingest.glob("layer-*/tar"))

    assert await asyncio.to_thread(wait_until, grown, 60)
    assert await asyncio.to_thread(wait_until, lambda: any(ingest.glob("layer-*/index")), 60), (
        "is begun"
    )
    # The configuration's blob is a file until it is whole. A file for the layer's blob would stay,
    # because that blob has stalled.
    assert await asyncio.to_thread(wait_until, lambda: not any(ingest.glob("blob-*")), 5)
    assert await service.list() == []
    pull.cancel()
    await asyncio.wait([pull], timeout=60)
    assert pull.cancelled() and left_over(tmp_path) == set()


async def test_an_interrupted_blob_gives_the_same_tar(
    registry: Registry, service: ImageService
) -> None:
    built = image([layer({"file": os.urandom(900_000)})])
    registry.push("app:v1", built)
    registry.fault("/blobs/", cut_at=300_000, times=3)  # the configuration is one, and whole
    assert await service.pull(f"{registry.host}/app:v1") == built.id
    ranges = [
        request.headers.get("range") for request in registry.requests if "/blobs/" in request.path
    ]
    assert sum(value is not None for value in ranges) == 2, "it went on where it stopped"


async def test_a_blob_with_other_content_fails_with_a_wrong_digest(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    """The error names the wrong digest, although decoding fails before the digest is known."""
    built = image([layer({"file": os.urandom(3_000_000)})])
    registry.push("app:v1", built)
    blob = max((tmp_path / "registry/blobs").iterdir(), key=lambda path: path.stat().st_size)
    registry.fault(blob.name, content=b"\x1f\x8b\x08" + os.urandom(blob.stat().st_size - 3))
    with pytest.raises(Exception, match="the content has the digest"):
        await service.pull(f"{registry.host}/app:v1")
    assert left_over(tmp_path) == set()


async def test_the_index_is_made_once(
    registry: Registry, service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The EROFS index of an image is built once, during the download, even if some of its layers
    are already stored."""
    calls: list[bool] = []
    make = service._store.maker._make_index

    async def counted(*arguments: Any) -> None:
        await make(*arguments)
        calls.append(len(arguments) == 4)

    monkeypatch.setattr(service._store.maker, "_make_index", counted)
    base, top = (layer({f"{name}/file": os.urandom(100_000)}) for name in ("base", "top"))
    for number, layers in enumerate(([base], [base, top], [top, base, top])):
        built = image(layers)
        registry.push(f"app:{number}", built)
        assert await service.pull(f"{registry.host}/app:{number}") == built.id
        assert calls == [True] * (number + 1)
        rootfs = await service.rootfs(built.id)
        paths = {
            str(path.relative_to(rootfs.lower_dirs[0])) for path in rootfs.lower_dirs[0].rglob("*")
        }
        assert paths == {"base", "base/file", "top", "top/file"} - (
            set() if number else {"top", "top/file"}
        )


def test_a_growing_tar_reads_like_a_complete_tar(tmp_path: Path) -> None:
    content = layer({f"folder/{n}": os.urandom(n * 100) for n in range(60)})
    for chunk in (100, 512, 70_000):
        (tmp_path / "tar").write_bytes(b"")
        reading, writing = os.pipe()
        fd = os.open(tmp_path / "tar", os.O_RDONLY)

        def grow(chunk: int = chunk, writing: int = writing) -> None:
            with open(tmp_path / "tar", "ab", buffering=0) as tar:
                for at in range(0, len(content), chunk):
                    tar.write(content[at : at + chunk])
                    os.write(writing, b".")
            os.close(writing)

        thread = threading.Thread(target=grow)
        thread.start()
        tar = TarFile(fd, Growth(reading))
        parsed = []
        for entry in members(tar):
            parsed.append((entry.name.rstrip(b"/"), entry.size, tar.position))
            skip(tar, entry.stored)
        tar.complete()
        thread.join()
        os.close(fd)
        os.close(reading)
        with tarfile.open(fileobj=io.BytesIO(content)) as expected:
            assert parsed == [(m.name.encode(), m.size, m.offset_data) for m in expected]
        assert tar.size_bytes == len(content)


# ---- the ring beside its reader


async def test_the_reader_gets_all_written_bytes() -> None:
    content = bytearray()

    async def read(end: Receiver) -> None:
        def all_of_it() -> None:
            while part := end.read():
                content.extend(part)

        await asyncio.to_thread(all_of_it)

    async with streamed(read) as blob:
        await asyncio.to_thread(blob.write, b"x" * 3_000_000)
    assert len(content) == blob.size == 3_000_000


@pytest.mark.parametrize(
    ("error", "raised"),
    [(BadLayer("no tar"), Interrupted), (ResourceExhausted("full"), ResourceExhausted)],
    ids=["content", "node"],
)
async def test_a_reader_that_ends_early_interrupts_the_download(
    error: Exception, raised: type[Exception]
) -> None:
    """When the reader finds wrong content, the download stops with Interrupted; when the disk is
    full, with ResourceExhausted."""
    # the error about wrong content comes later, from the complete file

    async def read(end: Receiver) -> None:
        raise error

    with pytest.raises(raised):
        async with streamed(read) as blob:
            await asyncio.to_thread(blob.write, b"x" * 3_000_000)


async def test_a_reader_that_fails_at_the_end_reports_the_reason() -> None:
    async def read(end: Receiver) -> None:
        await asyncio.to_thread(end.read)
        raise BadLayer("no tar")

    with pytest.raises(BadLayer):
        async with streamed(read) as blob:
            blob.write(b"x")


async def test_only_an_empty_ring_can_be_restarted() -> None:
    async def read(end: Receiver) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Interrupted):
        async with streamed(read) as blob:
            blob.restart()
            blob.write(b"x")
            blob.restart()
