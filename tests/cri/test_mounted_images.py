"""Tests containers of mounted images (`[images] store = "erofs"`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives.build import LayerFile, docker_archive, image, layer
from tests.cri.client_verbs import call, local_command_line, ok
from tests.cri.server_harness import IMAGE, REPOSITORY, Server, image_archive, server_fixture

EROFS = {"images": {"store": "erofs"}}


module_server = server_fixture("module", settings=EROFS)


# for tests that restart the server
own_server = server_fixture("function", settings=EROFS)


def files(server: Server, folder: str) -> list[Path]:
    return list((server.root / "images" / folder).iterdir())


def mounts_of(server: Server) -> list[str]:
    """Return the mountinfo lines of EROFS mounts and of the server's folder, as the server sees
    them."""
    lines = Path(f"/proc/{server.pid}/mountinfo").read_text().splitlines()
    return [line for line in lines if " - erofs " in line or str(server.folder) in line]


def held_mounts(server: Server) -> int:
    """Return the number of descriptors of image mounts that the server has open."""
    folder = Path(f"/proc/{server.pid}/fdinfo")
    count = 0
    for name in os.listdir(folder):
        try:
            target = os.stat(f"/proc/{server.pid}/fd/{name}/bin/busybox")
        except OSError:
            continue
        count += bool(target.st_size) and os.readlink(f"/proc/{server.pid}/fd/{name}") == "/"
    return count


def test_a_pull_writes_no_file_of_a_layer_and_mounts_nothing(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    containers = []
    for number in range(3):
        config = server.container_config()
        config.metadata.name = f"c{number}"
        containers.append(server.launch(pod, config))
    for container in containers:
        assert "www:x:33" in server.output(container, "cat", "/etc/passwd")
    assert files(server, "layers") == [] and len(files(server, "indexes")) == 1
    assert mounts_of(server) == []
    assert held_mounts(server) == 1, "the containers of an image share one mount"


def test_a_container_writes_to_its_own_layer(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    one = server.launch(pod)
    second = server.container_config()
    second.metadata.name = "d"
    two = server.launch(pod, second)
    server.output(
        one,
        "sh",
        "-c",
        "echo new >> /etc/passwd; rm /etc/group; mkdir /made; mv /bin /bin2; mv /bin2 /bin",
    )
    assert server.output(one, "tail", "-n1", "/etc/passwd") == "new\n"
    assert server.exec(one, "ls", "/etc/group").exit_code == 1
    assert "new" not in server.output(two, "cat", "/etc/passwd")
    assert server.output(two, "cat", "/etc/group").startswith("root")


def test_a_created_container_starts_after_a_crash_of_the_server(own_server: Server) -> None:
    server = own_server
    pod = server.run_pod(host_network=True)
    running = server.launch(pod)
    config = server.container_config()
    config.metadata.name = "later"
    config.mounts.append(
        api.Mount(
            container_path="/v",
            readonly=True,
            image=api.ImageSpec(image=IMAGE),
            image_sub_path="etc",
        )
    )
    created = server.create(pod, config)
    server.restart()
    assert "www" in server.output(running, "cat", "/etc/passwd")
    server.start_container(created)
    assert server.output(created, "ls", "/v").split() == ["group", "passwd"]
    assert server.exec(created, "touch", "/v/x").exit_code == 1


def test_a_pod_with_a_user_namespace_runs_a_mounted_image(server: Server) -> None:
    mapping = api.IDMapping(host_id=100_000, container_id=0, length=65_536)
    users = api.UserNamespace(mode=api.POD, uids=[mapping], gids=[mapping])
    pod_config, config = server.pod_config(), server.container_config()
    for options in (
        pod_config.linux.security_context.namespace_options,
        config.linux.security_context.namespace_options,
    ):
        options.userns_options.CopyFrom(users)
    config.mounts.append(
        api.Mount(container_path="/v", readonly=True, image=api.ImageSpec(image=IMAGE))
    )
    container = server.launch(server.run_pod(pod_config), config)
    for file in ("/etc/passwd", "/v/etc/passwd"):
        assert server.output(container, "stat", "-c", "%u %g", file).split() == ["0", "0"], file
    server.output(container, "sh", "-c", "echo x >> /etc/passwd")


def test_removing_an_image_removes_its_files(server: Server) -> None:
    before = len(files(server, "tars")), held_mounts(server)
    server.load_image(image_archive("registry.test/data:1", {"f": b"x" * 100_000}))
    assert (len(files(server, "tars")), held_mounts(server)) == (before[0] + 1, before[1])
    pod = server.run_pod(host_network=True)
    config = server.container_config()
    volume = api.Mount(
        container_path="/v", readonly=True, image=api.ImageSpec(image="registry.test/data:1")
    )
    config.mounts.append(volume)
    container = server.launch(pod, config)
    assert server.output(container, "wc", "-c", "/v/f").split() == ["100000", "/v/f"]
    removal = api.RemoveImageRequest(image=api.ImageSpec(image="registry.test/data:1"))
    with pytest.raises(grpc.RpcError, match="in use"):
        server.image.RemoveImage(removal)
    server.stop_pod(pod)
    server.remove_pod(pod)
    server.image.RemoveImage(removal)
    assert len(files(server, "tars")) == before[0]


def test_a_restart_may_change_the_store(own_server: Server) -> None:
    """If `[images] store` changes, images on disk keep their form; later images get the new
    form."""
    server = own_server
    pod = server.run_pod(host_network=True)
    container = server.launch(pod)
    server._settings = {"images": {"store": "unpacked"}}
    server._write_config()
    try:
        server.restart(Server.stop)
        second = server.container_config()
        second.metadata.name = "second"
        assert "www" in server.output(server.launch(pod, second), "cat", "/etc/passwd")
        server.load_image(image_archive("registry.test/data:1", {"f": b"x"}))
        assert len(files(server, "layers")) == 1
    finally:
        server._settings = EROFS
        server._write_config()
        server.restart(Server.stop)
    config = server.container_config()
    config.metadata.name = "third"
    config.mounts.append(
        api.Mount(
            container_path="/v", readonly=True, image=api.ImageSpec(image="registry.test/data:1")
        )
    )
    assert server.output(server.launch(pod, config), "cat", "/v/f") == "x"
    assert "www" in server.output(container, "cat", "/etc/passwd")
    server.stop_pod(pod)
    server.remove_pod(pod)
    server.image.RemoveImage(
        api.RemoveImageRequest(image=api.ImageSpec(image="registry.test/data:1"))
    )


def test_gc_converts_unused_images() -> None:
    """If `[images] store` has changed from unpacked to erofs, gc converts a stored image only when
    no container uses it."""
    with Server(settings={"images": {"store": "unpacked"}}) as server:
        server.load_image()
        pod = server.run_pod(host_network=True)
        container = server.launch(pod)
        server._settings = {"images": {"store": "erofs"}}
        server._write_config()
        server.restart(Server.stop)
        assert "www" in server.output(container, "cat", "/etc/passwd")
        [item] = [item for item in collect_garbage(server) if item["kind"] == "image"]
        assert item["action"] == "keep", item
        assert item["why"] == (
            f"used by {container[:12]}; converted when unused,"
            " because [images] store requires it mounted"
        )
        assert "www" in server.output(container, "cat", "/etc/passwd")
        server.remove_all()
        [item] = [item for item in collect_garbage(server, dry_run=True) if item["kind"] == "image"]
        assert item["action"] == "convert" and files(server, "tars") == []
        [item] = [item for item in collect_garbage(server) if item["kind"] == "image"]
        assert (item["action"], item["why"]) == ("converted", "[images] store requires it mounted")
        assert files(server, "layers") == [] and files(server, "tars") != []
        [item] = [item for item in collect_garbage(server) if item["kind"] == "image"]
        assert item["action"] == "keep"
        container = server.launch(server.run_pod(host_network=True))
        assert "www" in server.output(container, "cat", "/etc/passwd")


def collect_garbage(server: Server, dry_run: bool = False) -> list[dict[str, Any]]:
    command = local_command_line(server, "gc", "--json")
    done = subprocess.run(
        [*command, *["--dry-run"] * dry_run], capture_output=True, cwd=REPOSITORY, check=True
    )
    items: list[dict[str, Any]] = json.loads(done.stdout)
    return items


def test_gc_removes_a_tar_without_image(server: Server) -> None:
    for folder in ("tars", "indexes"):
        (server.root / "images" / folder / ("4" * 64)).write_bytes(b"x" * 10_000)
    removed = {(i["kind"], i["name"]) for i in collect_garbage(server) if i["action"] == "removed"}
    assert removed == {("tar", "4" * 64), ("index", "4" * 64)}


def test_a_layer_whose_tar_was_changed_is_not_run(server: Server) -> None:
    """CreateContainer fails if a layer's tar has another length than when its index was made."""
    server.load_image(image_archive("registry.test/cut:1", {"f": b"x" * 10_000}))
    tar = max(files(server, "tars"), key=os.path.getmtime)
    os.truncate(tar, 1024)
    pod = server.run_pod(host_network=True)
    config = server.container_config(image=api.ImageSpec(image="registry.test/cut:1"))
    with pytest.raises(grpc.RpcError, match="does not fit the layers' tars"):
        server.create(pod, config)
    server.image.RemoveImage(
        api.RemoveImageRequest(image=api.ImageSpec(image="registry.test/cut:1"))
    )


@pytest.mark.parametrize("store", ["erofs", "unpacked"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_command_mounts_an_image_on_a_folder(tmp_path: Path, store: str, layers: int) -> None:
    name = "registry.test/files:1"
    tars = [
        layer({f"f{number}": f"{number}", "top": f"{number}", "set": LayerFile(b"x", mode=0o4755)})
        for number in range(layers)
    ]
    place = tmp_path / "a place"
    place.mkdir()
    with Server(network=False, settings={"images": {"store": store}}) as server:
        server.load_image(docker_archive({name: image(tars)}))
        ok(server, "image", "mount", name, str(place))
        try:
            assert {path.name for path in place.iterdir()} == {
                "top",
                "set",
                *(f"f{n}" for n in range(layers)),
            }
            assert (place / "top").read_text() == f"{layers - 1}"
            with pytest.raises(OSError, match="Read-only"):
                (place / "new").touch()
            flags = os.statvfs(place).f_flag
            assert flags & os.ST_NOSUID and flags & os.ST_NODEV
            with open(place / "top"):
                done = call(server, "image", "umount", str(place))
                assert done.code == 1 and "EBUSY" in done.error
            if store == "erofs":
                server.image.RemoveImage(api.RemoveImageRequest(image=api.ImageSpec(image=name)))
                assert (place / "f0").read_text() == "0"
        finally:
            ok(server, "image", "umount", str(place))
        assert list(place.iterdir()) == []


def test_unmount_refuses_mounts_of_no_image(server: Server, tmp_path: Path) -> None:
    for folder, words in (
        (tmp_path, "nothing is mounted at"),
        (Path("/proc"), "is not an image, but a proc file system"),
    ):
        done = call(server, "image", "umount", str(folder))
        assert done.code == 1 and words in done.error
    for words, code, message in (
        ((IMAGE, str(tmp_path / "none")), 2, "is no directory"),
        (("registry.test/none:1", str(tmp_path)), 1, "no such image"),
    ):
        done = call(server, "image", "mount", *words)
        assert done.code == code and message in done.error
    assert not os.path.ismount(tmp_path)
