"""Attacks by registries that send layers, which other pulls need, at a few bytes per second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cri_server.images.archives.build import BuiltImage, image, layer
from cri_server.images.layers import sharing
from cri_server.images.service import ImageService
from cri_server.images.store.layer_jobs import STREAMS_AT_ONCE
from tests.cri.images.conftest import each_store, service
from tests.support.registry import Registry, wait_for

__all__ = ["each_store", "service"]
pytestmark = pytest.mark.usefixtures("each_store")

BYTES_PER_SECOND = 64
SOON_S = 20.0  # at 64 bytes a second a layer takes longer than a test may


def noise(seed: int) -> bytes:
    """Return a layer of 20 KiB that does not compress."""
    return layer({f"file-{seed}": "".join(f"{seed * 7919 + n * 104729:x}" for n in range(3000))})


BASE = image([noise(1), noise(2)])


@pytest.fixture
def trickling(tmp_path: Path) -> Iterator[Registry]:
    """Start the attacker's registry, which `trickled` makes slow."""
    with Registry(tmp_path / "trickling") as running:
        yield running


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path / "registry") as running:
        running.push("base:v1", BASE)
        yield running


@asynccontextmanager
async def trickled(
    service: ImageService, registry: Registry, *images: BuiltImage
) -> AsyncIterator[None]:
    """Pull these images, whose layers `registry` sends slowly, until the end of the `with`
    block."""
    configurations = "|".join(image.id for image in images)
    registry.fault(rf"/blobs/(?!{configurations})", byte_delay_s=1 / BYTES_PER_SECOND)
    for number, built in enumerate(images):
        registry.push(f"mine-{number}:v1", built)
    pulls = [
        asyncio.create_task(service.pull(f"{registry.host}/mine-{number}:v1"))
        for number in range(len(images))
    ]
    layers = min(sum(len(built.layers) for built in images), STREAMS_AT_ONCE)
    try:
        begun = await asyncio.to_thread(
            wait_for, lambda: len(registry.requested("/blobs/")) >= layers + len(images)
        )
        assert begun
        yield
        assert not any(pull.done() for pull in pulls)
    finally:
        registry.stopping.set()  # so that no thread continues
        for pull in pulls:
            pull.cancel()
        await asyncio.wait(pulls)


async def test_a_slow_registry_does_not_delay_pulls_from_another_registry(
    service: ImageService, registry: Registry, trickling: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker's registry serves a copy of a public image at 64 bytes per second, to a pull
    that never ends. Other pulls of that image from its own registry are not delayed."""
    monkeypatch.setattr(sharing, "SLOW_S", 3600.0)  # so that slowness is not the reason
    async with trickled(service, trickling, BASE):
        async with asyncio.timeout(SOON_S):
            assert await service.pull(f"{registry.host}/base:v1") == BASE.id
    [image] = await service.list()
    assert image.id == BASE.id


async def test_slow_streams_do_not_delay_other_pulls(
    service: ImageService, registry: Registry, trickling: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of a slow registry occupy all streams that are decoded while they arrive. Layers of
    other pulls are fetched into files after a moment."""
    monkeypatch.setattr(sharing, "STREAM_WAIT_S", 0.2)
    images = [image([noise(100 * (n + 1) + m) for m in range(4)]) for n in range(4)]
    assert sum(len(built.layers) for built in images) >= STREAMS_AT_ONCE
    async with trickled(service, trickling, *images):
        async with asyncio.timeout(SOON_S):
            assert await service.pull(f"{registry.host}/base:v1") == BASE.id


async def test_a_slow_tenant_of_a_registry_does_not_delay_other_tenants(
    service: ImageService, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry sends one tenant's copy of a base image slowly, as a proxy cache may do. Other
    pulls of the image from that registry wait for the first one only for a moment."""
    monkeypatch.setattr(sharing, "SLOW_S", 0.5)
    registry.fault("/blobs/" + r"(?!" + BASE.id + ")", times=2, byte_delay_s=1 / BYTES_PER_SECOND)
    registry.push("mine:v1", BASE)
    pull = asyncio.create_task(service.pull(f"{registry.host}/mine:v1"))
    try:
        assert await asyncio.to_thread(wait_for, lambda: len(registry.requested("/blobs/")) >= 3)
        async with asyncio.timeout(SOON_S):
            assert await service.pull(f"{registry.host}/base:v1") == BASE.id
        assert not pull.done()
    finally:
        registry.stopping.set()
        pull.cancel()
        await asyncio.wait([pull])


async def test_pulls_from_a_fast_registry_share_a_layer(
    service: ImageService, registry: Registry
) -> None:
    """While a layer arrives fast enough, two pulls from the same registry fetch it only once."""
    registry.push("other:v1", image([*BASE.layers, noise(3)]))
    await asyncio.gather(
        service.pull(f"{registry.host}/base:v1"), service.pull(f"{registry.host}/other:v1")
    )
    blobs = [request.path for request in registry.requested("/blobs/")]
    assert len(blobs) == len(set(blobs)) == 5  # two configurations, three layers
