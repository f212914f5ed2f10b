"""Fixtures of the image tests: an image service, a registry, and an unpacker without either."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cri_server.images.layers.inflate import TarStream, UnpackLimits
from cri_server.images.layers.unpack import TREE, Layer, unpack
from cri_server.images.service import ImageService, Rootfs
from cri_server.images.store.layer_jobs import LayerJobs
from cri_server.images.store.layer_maker import JOB_MODULES
from tests.cri.images.puller import STORE
from tests.support.layer_threads import LayerThreads
from tests.support.registry import Registry
from tests.support.zygotes import start_zygote

Unpack = Callable[[bytes], Path]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make registry requests wait only 10 ms before a retry."""
    monkeypatch.setattr("cri_server.images.registry.registry.BACKOFF_S", (0.01,))


@pytest.fixture
def unpacked(tmp_path: Path) -> Iterator[Unpack]:
    """Return a function that unpacks a layer's blob into a new folder and returns its tree."""
    count = 0

    def run(blob: bytes, limits: UnpackLimits | None = None) -> Path:
        nonlocal count
        count += 1
        folder = tmp_path / f"layer-{count}"
        folder.mkdir(mode=0o700)
        unpack_bytes(blob, folder, limits)
        return folder / TREE

    yield run


def unpack_bytes(blob: bytes, folder: Path, limits: UnpackLimits | None = None) -> Layer:
    """Unpack the layer `blob` into `folder`."""
    fd = os.memfd_create("blob", os.MFD_CLOEXEC)
    try:
        with io.FileIO(fd, "wb", closefd=False) as file:
            file.write(blob)
        os.lseek(fd, 0, os.SEEK_SET)
        limits = limits or UnpackLimits()
        return unpack(TarStream(fd, limits), str(folder), None, limits)
    finally:
        os.close(fd)


@pytest.fixture(params=["unpacked", "erofs"])
def each_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with unpacked and once with mounted (EROFS) images; return the setting."""
    # for services of this process, then for those of its children
    defaults = ImageService.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "store", request.param)
    monkeypatch.setenv(STORE, request.param)
    return str(request.param)


only_unpacked = pytest.mark.parametrize("each_store", ["unpacked"], indirect=True)
only_erofs = pytest.mark.parametrize("each_store", ["erofs"], indirect=True)


def texts(rootfs: Rootfs, name: str) -> list[str]:
    """Return the texts of the file `name`: of each layer, top first, or of the mounted image."""
    return [(folder / name).read_text() for folder in rootfs.lower_dirs]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        yield running


@asynccontextmanager
async def with_jobs(tmp_path: Path, *modules: str) -> AsyncIterator[ImageService]:
    """Provide an image service that unpacks layers in jobs of a zygote, like the server. The zygote
    also imports `modules`."""
    zygote = await start_zygote([*JOB_MODULES, *modules])
    service = ImageService(
        tmp_path / "images",
        [tmp_path / "certs.d"],
        jobs=LayerJobs(zygote),
        no_progress_timeout_s=20.0,
    )
    await service.start()
    yield service
    await service.close()
    await zygote.close()


@pytest.fixture
async def job_service(tmp_path: Path) -> AsyncIterator[ImageService]:
    async with with_jobs(tmp_path) as running:
        yield running


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ImageService]:
    """Provide an empty image service, whose registries are configured in `tmp_path`/certs.d."""
    image_service = ImageService(
        tmp_path / "images", [tmp_path / "certs.d"], no_progress_timeout_s=10.0, jobs=LayerThreads()
    )
    await image_service.start()
    yield image_service
    await image_service.close()
