"""Tests that after a restart of the server new containers share the page cache of their image with
running ones, because the keeper stores the image's mount. If the keeper is killed, too, new
containers have separate pages."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from cri_server.images.store.mount_store import PREFIX
from pyrunc.keeper.client import Keeper
from tests.cri.server_harness import IMAGE, Server
from tests.support.keeper import end_keeper, keeper_pid
from tests.support.page_cache import cached_pages
from tests.support.processes import wait_until
from tests.support.service_manager import ServiceManager

CONTENT = os.urandom(2_000_000)  # the kernel may reclaim some pages at any time, but hardly all


@pytest.fixture
def server() -> Iterator[Server]:
    """Provide a server that has loaded an image with the file `big`."""
    with Server(network=False, settings={"images": {"store": "erofs"}}) as started:
        load(started)
        yield started


def stored(server: Server) -> list[str]:
    """Return the names of the mounts that the keeper stores."""
    keeper = Keeper(server.state)
    try:
        return keeper.names(PREFIX)
    finally:
        keeper.close()


def load(server: Server) -> None:
    layers = [*build.busybox().layers, build.layer({"big": CONTENT})]
    server.load_image(build.docker_archive({IMAGE: build.image(layers)}))


def big_file(server: Server, pod: str, name: str) -> Path:
    """Return the path of the file with CONTENT in a new container."""
    config = server.container_config()
    config.metadata.name = name
    request = api.ContainerStatusRequest(container_id=server.launch(pod, config), verbose=True)
    pid = json.loads(server.runtime.ContainerStatus(request).info["info"])["pid"]
    return Path(f"/proc/{pid}/root/big")


def superblocks(server: Server) -> set[int]:
    """Return the device numbers of the image mounts that the server has open."""
    folder, devices = Path(f"/proc/{server.pid}/fd"), set()
    for fd in folder.iterdir():
        if (fd / "big").exists():
            devices.add(os.stat(fd).st_dev)
    return devices


@pytest.mark.parametrize("how", [Server.kill, Server.stop], ids=["killed", "stopped"])
def test_new_containers_share_pages_with_running_containers(
    server: Server, how: Callable[[Server], object]
) -> None:
    pod = server.run_pod(host_network=True)
    first = big_file(server, pod, "first")
    assert first.read_bytes() == CONTENT
    before = superblocks(server)
    for name in ("second", "third"):
        server.restart(how)
        assert superblocks(server) == before and len(before) == 1
        later = big_file(server, pod, name)
        assert cached_pages(later), "no container has read the file there"
        assert later.read_bytes() == CONTENT
    server.remove_all()
    server.image.RemoveImage(api.RemoveImageRequest(image=api.ImageSpec(image=IMAGE)))
    assert wait_until(lambda: stored(server) == [], 30)


def test_the_next_keeper_gets_the_mounts(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    assert big_file(server, pod, "first").read_bytes() == CONTENT
    before, names = superblocks(server), stored(server)
    end_keeper(server.state, signal.SIGKILL)
    assert wait_until(lambda: keeper_pid(server.state) and stored(server) == names, 30)
    server.restart()
    assert superblocks(server) == before


def test_a_server_whose_keeper_was_killed_with_it_does_not_share_pages(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    first = big_file(server, pod, "first")
    assert first.read_bytes() == CONTENT
    server.kill()
    end_keeper(server.state, signal.SIGKILL)
    server.start()
    second = big_file(server, pod, "second")
    assert cached_pages(second) == 0 and second.read_bytes() == CONTENT
    assert cached_pages(first) and cached_pages(second), "the file is in memory twice"


def test_the_keeper_ends_after_a_server_without_pods(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    big_file(server, pod, "first")
    server.remove_all()
    assert len(stored(server)) == 1
    server.stop()
    assert wait_until(lambda: not keeper_pid(server.state), 30)
    server.start()


def test_a_server_in_another_mount_namespace_makes_its_own_mounts(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    assert big_file(server, pod, "first").read_bytes() == CONTENT
    # As when the server's unit gets a private /tmp: the stored mounts belong to the earlier mount
    # namespace.
    server._prefix = ["unshare", "--mount"]
    server.restart()
    later = big_file(server, pod, "second")
    assert cached_pages(later) and later.read_bytes() == CONTENT


def test_mounts_in_systemds_store_move_to_the_keeper(tmp_path: Path) -> None:
    """A mount that an earlier version has left in systemd's descriptor store moves to the keeper,
    and no process of the server inherits it."""
    with (
        ServiceManager(tmp_path) as manager,
        Server(network=False, settings={"images": {"store": "erofs"}}, manager=manager) as server,
    ):
        load(server)
        pod = server.run_pod(host_network=True)
        first = big_file(server, pod, "first")
        assert first.read_bytes() == CONTENT
        (name,) = stored(server)
        keeper, before = Keeper(server.state), superblocks(server)
        entry = keeper.get(name)
        assert entry is not None
        manager.keep(f"image-{'0' * 64}-{name.removeprefix(PREFIX)}", entry.fds[0])
        server.kill()
        keeper.drop(name)
        server.start()
        assert manager.store == {} and superblocks(server) == before
        assert wait_until(lambda: keeper.names(PREFIX) == [name], 30)
        keeper.close()
        path = big_file(server, pod, "second").parent.parent
        assert "LISTEN_" not in (path / "environ").read_text()
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        for child in children:
            links = [fd for fd in Path(f"/proc/{child}/fd").iterdir() if (fd / "big").exists()]
            assert links == [] and "LISTEN_" not in Path(f"/proc/{child}/environ").read_text(), (
                child
            )
