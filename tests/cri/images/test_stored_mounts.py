"""Image mounts in the service manager's descriptor store: the next server uses those that match
its files, and no others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cri_server.images.service import ImageService
from cri_server.systemd.descriptor_store import DescriptorStore
from pyrunc.kernel.mount import open_mount
from tests.cri.images.conftest import texts
from tests.cri.images.test_pull import make
from tests.support.registry import Registry
from tests.support.service_manager import ServiceManager, manager

__all__ = ["manager"]

BUILT = make()


class Node:
    """A store of images and its manager; services come and go."""

    def __init__(self, root: Path, manager: ServiceManager, registry: Registry) -> None:
        self.root, self.manager, self._registry = root, manager, registry
        self.service: ImageService | None = None

    async def restart(self, store: str = "erofs") -> ImageService:
        await self.stop()
        received = {name: os.dup(fd) for name, fd in self.manager.store.items()}
        self.service = ImageService(self.root, store=store, descriptors=DescriptorStore(received))
        await self.service.start()
        return self.service

    async def stop(self) -> None:
        if self.service is not None:
            await self.service.close()

    async def pull(self) -> None:
        self._registry.push("team/app:v1", BUILT)
        assert self.service is not None
        assert await self.service.pull(f"{self._registry.host}/team/app:v1") == BUILT.id

    async def mounted(self) -> int:
        """Returns the device number of the superblock that shows the image. No other superblock has
        this number while the manager holds it."""
        assert self.service is not None
        root = await self.service.rootfs(BUILT.id)
        assert root.mount is not None and texts(root, "top") == ["2"]
        return os.fstat(root.mount.fd).st_dev


@pytest.fixture
async def node(tmp_path: Path, manager: ServiceManager, registry: Registry) -> AsyncIterator[Node]:
    """Returns a node whose store has a mounted image."""
    made = Node(tmp_path / "images", manager, registry)
    await made.restart()
    await made.pull()
    await made.mounted()
    yield made
    await made.stop()


async def test_the_next_service_uses_the_same_superblock(node: Node) -> None:
    before, [name] = await node.mounted(), list(node.manager.store)
    for _ in range(2):
        await node.restart()
        assert await node.mounted() == before
    assert list(node.manager.store) == [name]
    assert [m for m in node.manager.messages if "FDSTORE=1" in m] == [
        f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0"
    ]


async def test_removing_an_image_removes_its_stored_mount(node: Node) -> None:
    service = await node.restart()
    await service.remove(BUILT.id)
    await service._store.wait_deleted()
    assert node.manager.store == {}
    await node.pull()
    await node.mounted()
    assert len(node.manager.store) == 1


async def test_unpacking_an_image_removes_its_stored_mount(node: Node) -> None:
    service = await node.restart("unpacked")
    assert len(node.manager.store) == 1, (
        "a server that is told to unpack goes on mounting what is here"
    )
    assert await service.convert(BUILT.id)
    await service._store.wait_deleted()
    assert node.manager.store == {}


async def test_a_stored_mount_of_a_removed_image_is_removed(node: Node, tmp_path: Path) -> None:
    """This happens when the server is killed after the removal and before its message to the
    manager, or when it gets another root directory."""
    await node.stop()
    node.root = tmp_path / "other"
    await node.restart()
    assert node.manager.store == {}


async def test_stored_descriptors_with_unknown_names_are_removed(node: Node) -> None:
    for name in ("unknown", "pyrunc.socket", "image-", "image-" + "0" * 129):
        node.manager.keep(name, os.open("/", os.O_PATH))
    before = await node.mounted()
    await node.restart()
    assert await node.mounted() == before and len(node.manager.store) == 1


@pytest.mark.parametrize("file", ["tars", "indexes"])
async def test_a_stored_mount_of_a_replaced_file_is_not_used(node: Node, file: str) -> None:
    """The file was replaced by a copy with the same content: the mount uses another inode than the
    path."""
    await node.stop()
    path = next((node.root / file).iterdir())
    (node.root / "copy").write_bytes(path.read_bytes())
    os.rename(node.root / "copy", path)
    old = set(node.manager.store)
    await node.restart()
    assert node.manager.store == {}
    await node.mounted()
    assert len(node.manager.store) == 1 and not old & set(node.manager.store)


async def test_a_stored_mount_of_a_modified_file_is_not_used(node: Node) -> None:
    await node.stop()
    path = next((node.root / "tars").iterdir())
    os.utime(path, ns=(0, 1))
    await node.restart()
    assert node.manager.store == {}
    await node.mounted()


@pytest.mark.parametrize(
    "what", ["a folder of it", "a folder", "a file", "a tmpfs", "another image"]
)
async def test_stored_descriptors_that_do_not_match_their_name_are_not_used(
    node: Node, registry: Registry, tmp_path: Path, what: str
) -> None:
    [(name, fd)] = node.manager.store.items()
    if what == "a folder of it":
        (wrong,) = [os.open(f"/proc/self/fd/{fd}/layer-0", os.O_PATH)]
    elif what == "a tmpfs":
        wrong = open_mount("tmpfs")
    elif what == "another image":
        assert node.service is not None
        other = make(seed=1)
        registry.push("team/other:v1", other)
        root = await node.service.rootfs(await node.service.pull(f"{registry.host}/team/other:v1"))
        assert root.mount is not None
        wrong = os.dup(root.mount.fd)
    else:
        (tmp_path / "file").touch()
        wrong = os.open(tmp_path / ("file" if what == "a file" else "."), os.O_PATH)
    before = await node.mounted()
    await node.stop()
    copy = os.dup(fd)
    DescriptorStore().remove(name)
    node.manager.keep(name, wrong)
    try:
        await node.restart()
        assert name not in node.manager.store
        assert await node.mounted() != before
        assert name in node.manager.store, "the new mount is of the same files"
    finally:
        os.close(copy)


async def test_a_full_descriptor_store_only_prevents_sharing(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServiceManager(tmp_path, limit=0) as full:
        monkeypatch.setenv("NOTIFY_SOCKET", str(full.address))
        node = Node(tmp_path / "images", full, registry)
        await node.restart()
        await node.pull()
        for _ in range(2):
            await node.mounted()
            await node.restart()
        assert sum("FDSTORE=1" in message for message in full.messages) == 2 and full.store == {}
        await node.stop()


async def test_a_missing_manager_only_prevents_sharing(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    await node.stop()
    node.service = ImageService(node.root, store="erofs", descriptors=DescriptorStore())
    await node.service.start()
    await node.mounted()
    assert "NOTIFY_SOCKET: " in caplog.text


async def test_images_of_the_same_layers_have_the_same_stored_mount(
    node: Node, registry: Registry
) -> None:
    assert node.service is not None
    same = make(Labels={"a": "b"})
    registry.push("team/same:v1", same)
    assert await node.service.pull(f"{registry.host}/team/same:v1") != BUILT.id
    for _ in range(2):
        roots = await asyncio.gather(*(node.service.rootfs(one.id) for one in (BUILT, same)))
        assert len({root.mount for root in roots}) == 1 and len(node.manager.store) == 1
        await node.restart()
    assert node.service is not None
    await node.service.remove(BUILT.id)
    await node.service._store.wait_deleted()
    assert len(node.manager.store) == 1
