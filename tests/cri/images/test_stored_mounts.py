"""Tests image mounts that the keeper process stores: after a restart the server uses those that
match its files, and no others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cri_server.images.service import ImageService
from cri_server.images.store import mount_store
from cri_server.images.store.mount_store import MountStore
from pyrunc.keeper.client import Keeper, ensure
from pyrunc.kernel.mount import open_mount
from tests.cri.images.conftest import texts
from tests.cri.images.test_pull import make
from tests.support.keeper import end_keeper
from tests.support.layer_threads import LayerThreads
from tests.support.registry import Registry
from tests.support.service_manager import ServiceManager, manager

__all__ = ["manager"]

BUILT = make()


class Node:
    """A node with an image store and a keeper process, on which image services start and stop."""

    def __init__(self, root: Path, keeper: Keeper, registry: Registry) -> None:
        self.root, self.keeper, self._registry = root, keeper, registry
        self.service: ImageService | None = None
        self.in_use = True

    async def restart(
        self, store: str = "erofs", received: dict[str, int] | None = None
    ) -> ImageService:
        await self.stop()
        self.service = ImageService(
            self.root,
            store=store,
            mounts=MountStore(Path(self.keeper.folder), received),
            in_use=lambda image_id: ["container"] if self.in_use else [],
            jobs=LayerThreads(),
        )
        await self.service.start()
        return self.service

    async def stop(self) -> None:
        if self.service is not None:
            await self.service.close()
            self.service = None

    @property
    def stored(self) -> list[str]:
        """Return the names of the mounts that the keeper stores."""
        return self.keeper.names()

    def descriptor(self, name: str) -> int:
        """Return a copy of the descriptor of the stored mount `name`."""
        entry = self.keeper.get(name)
        assert entry is not None
        (fd,) = entry.fds
        return fd

    async def pull(self) -> None:
        self._registry.push("team/app:v1", BUILT)
        assert self.service is not None
        assert await self.service.pull(f"{self._registry.host}/team/app:v1") == BUILT.id

    async def mounted(self) -> int:
        """Mount the image if necessary; return the device number of its file system."""
        # no other superblock has this number while the keeper holds the mount
        assert self.service is not None
        root = await self.service.rootfs(BUILT.id)
        assert root.mount is not None and texts(root, "top") == ["2"]
        return os.fstat(root.mount.fd).st_dev


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """Provide the client of a new keeper process."""
    (tmp_path / "state").mkdir()
    client = ensure(tmp_path / "state")
    yield client
    client.close()
    end_keeper(tmp_path / "state")


@pytest.fixture
async def node(tmp_path: Path, keeper: Keeper, registry: Registry) -> AsyncIterator[Node]:
    """Provide a node with a pulled and mounted image."""
    started = Node(tmp_path / "images", keeper, registry)
    await started.restart()
    await started.pull()
    await started.mounted()
    yield started
    await started.stop()


async def test_the_next_service_uses_the_same_superblock(node: Node) -> None:
    before, [name] = await node.mounted(), node.stored
    for _ in range(2):
        await node.restart()
        assert await node.mounted() == before
    assert node.stored == [name]


async def test_a_stopped_service_leaves_no_mount_of_an_unused_image(node: Node) -> None:
    # the keeper does not end while it stores a mount
    node.in_use = False
    await node.stop()
    assert node.stored == []


async def test_a_mount_in_systemds_store_moves_to_the_keeper(
    node: Node, manager: ServiceManager
) -> None:
    # an earlier version, without a keeper, left the mount there
    before, [name] = await node.mounted(), node.stored
    earlier_name = f"image-{'0' * 64}-{name.removeprefix('image/')}"
    fd = node.descriptor(name)
    await node.stop()
    node.keeper.drop(name)
    for stored in (earlier_name, "other"):
        manager.keep(stored, os.dup(fd) if stored == earlier_name else os.open("/", os.O_PATH))
    received = {stored: os.dup(copy) for stored, copy in manager.store.items()}
    service = await node.restart(received=received)
    os.close(fd)
    assert manager.store == {}
    assert await node.mounted() == before
    await service.store_mounts()
    assert node.stored == [name]
    await node.restart()
    assert await node.mounted() == before


async def test_a_new_keeper_gets_the_mounts(node: Node, tmp_path: Path) -> None:
    before, [name] = await node.mounted(), node.stored
    end_keeper(tmp_path / "state", signal.SIGKILL)
    ensure(tmp_path / "state").close()
    assert node.stored == []
    assert node.service is not None
    await node.service.store_mounts()
    assert node.stored == [name]
    await node.restart()
    assert await node.mounted() == before


async def test_removing_an_image_removes_its_stored_mount(node: Node) -> None:
    service = await node.restart()
    node.in_use = False
    await service.remove(BUILT.id)
    await service._store.wait_deleted()
    assert node.stored == []
    await node.pull()
    await node.mounted()
    assert len(node.stored) == 1


async def test_unpacking_an_image_removes_its_stored_mount(node: Node) -> None:
    service = await node.restart("unpacked")
    assert len(node.stored) == 1, (
        "a server that unpacks new images has dropped the mount of a stored one"
    )
    node.in_use = False
    assert await service.convert(BUILT.id)
    await service._store.wait_deleted()
    assert node.stored == []


async def test_a_stored_mount_of_a_removed_image_is_removed(node: Node, tmp_path: Path) -> None:
    """A starting service removes stored mounts of images that its store does not have."""
    # as after a kill between the image's removal and the keeper's, or with another root directory
    await node.stop()
    node.root = tmp_path / "other"
    await node.restart()
    assert node.stored == []


async def test_stored_descriptors_with_unknown_names_are_removed(node: Node) -> None:
    root = os.open("/", os.O_PATH)
    for name in ("image/unknown", "image/", "image/" + "0" * 64):
        node.keeper.put(name, b"", [root])
    node.keeper.put("pod/abc", b"", [root])
    os.close(root)
    before, stored = await node.mounted(), node.stored
    await node.restart()
    assert await node.mounted() == before
    assert len(stored) == 5 and len(node.stored) == 2 and "pod/abc" in node.stored


@pytest.mark.parametrize("file", ["tars", "indexes"])
async def test_a_stored_mount_of_a_replaced_file_is_not_used(node: Node, file: str) -> None:
    """When a tar or index is replaced by a copy of itself, a restarted service mounts the image
    again."""
    await node.stop()
    path = next((node.root / file).iterdir())
    (node.root / "copy").write_bytes(path.read_bytes())
    os.rename(node.root / "copy", path)
    old = set(node.stored)
    await node.restart()
    assert node.stored == []
    await node.mounted()
    assert len(node.stored) == 1 and not old & set(node.stored)


async def test_a_stored_mount_of_a_modified_file_is_not_used(node: Node) -> None:
    await node.stop()
    path = next((node.root / "tars").iterdir())
    os.utime(path, ns=(0, 1))
    await node.restart()
    assert node.stored == []
    await node.mounted()


@pytest.mark.parametrize(
    "what", ["a folder of it", "a folder", "a file", "a tmpfs", "another image"]
)
async def test_stored_descriptors_that_do_not_match_their_name_are_not_used(
    node: Node, registry: Registry, tmp_path: Path, what: str
) -> None:
    [name] = node.stored
    fd = node.descriptor(name)
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
    node.keeper.put(name, b"", [wrong])
    os.close(wrong)
    try:
        await node.restart()
        assert name not in node.stored
        assert await node.mounted() != before
        assert name in node.stored, "the new mount is of the same files"
    finally:
        os.close(fd)


async def test_mounts_beyond_the_limit_are_not_stored(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    [name] = node.stored
    await node.stop()
    node.keeper.drop(name)
    monkeypatch.setattr(mount_store, "MOST", 0)
    for _ in range(2):
        await node.restart()
        await node.mounted()
        assert node.stored == []


async def test_a_missing_keeper_only_prevents_sharing(node: Node, tmp_path: Path) -> None:
    end_keeper(tmp_path / "state")
    for _ in range(2):
        await node.mounted()
        await node.restart()
    await node.mounted()


async def test_images_of_the_same_layers_have_the_same_stored_mount(
    node: Node, registry: Registry
) -> None:
    assert node.service is not None
    same = make(Labels={"a": "b"})
    registry.push("team/same:v1", same)
    assert await node.service.pull(f"{registry.host}/team/same:v1") != BUILT.id
    for _ in range(2):
        roots = await asyncio.gather(*(node.service.rootfs(one.id) for one in (BUILT, same)))
        assert len({root.mount for root in roots}) == 1 and len(node.stored) == 1
        await node.restart()
    assert node.service is not None
    node.in_use = False
    await node.service.remove(BUILT.id)
    await node.service._store.wait_deleted()
    assert len(node.stored) == 1
