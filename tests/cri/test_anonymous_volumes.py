"""Tests the VOLUMEs of an image: folders of the container on disk, with the image's content,
removed with the container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from cri_server.images.archives.build import LayerFile, directory, symlink
from tests.cri.images.test_hostile import hardlink
from tests.cri.server_harness import Server, code_of, message_of

NAME = "registry.test/volumes:1"
DECLARED = ["/data", "/data/", "/missing/deep", "/data/nested", "/over", "/sys/fs/cgroup"]


def load(server: Server, name: str, files: build.Files, volumes: list[str]) -> None:
    """Load an image of a busybox layer, a layer with these files, and the declared volumes."""
    layers = [*build.busybox().layers, build.layer(files)]
    config = {"Env": ["PATH=/bin"], "Cmd": ["sh"], "Volumes": {place: {} for place in volumes}}
    server.load_image(build.docker_archive({name: build.image(layers, config)}))


def config_of(server: Server, name: str, **changes: object) -> api.ContainerConfig:
    return server.container_config(image=api.ImageSpec(image=name), **changes)


@pytest.fixture
def server_with_volumes(server: Server) -> Iterator[Server]:
    files = {
        "data": directory(0o1770, uid=7, gid=8),
        "data/file": LayerFile(b"content", 0o4755, uid=70, gid=80, mtime=1_600_000_000),
        "data/again": hardlink("data/file"),
        "data/link": symlink("/etc/passwd"),
        "data/nested/inner": b"inner",
        "over/hidden": b"",
    }
    load(server, NAME, files, DECLARED)
    yield server


def test_a_volume_begins_with_the_images_content(server_with_volumes: Server) -> None:
    server = server_with_volumes
    container = server.launch(server.run_pod(), config_of(server, NAME))
    script = (
        "cd /data; stat -c '%a %u:%g %h %Y' . file | cut -d' ' -f1,2; stat -c '%h %Y' file; cat"
        " file nested/inner; echo; readlink link"
    )
    assert server.output(container, "sh", "-c", script).split() == [
        "1770", "7:8", "4755", "70:80", "2", "1600000000", "contentinner", "/etc/passwd",
    ]  # fmt: skip
    listed = server.output(
        container, "sh", "-c", "cut -d' ' -f5 /proc/self/mountinfo | sort"
    ).split()
    assert {"/data", "/data/nested", "/missing/deep", "/over"} <= set(listed)
    assert listed.count("/data") == listed.count("/sys/fs/cgroup") == 1
    assert server.output(container, "stat", "-c", "%a %u", "/missing/deep") == "755 0\n"


def test_a_volume_belongs_to_one_container_and_is_removed_with_the_container(
    server_with_volumes: Server,
) -> None:
    server = server_with_volumes
    pod = server.run_pod()
    readonly = api.LinuxContainerConfig()
    readonly.security_context.readonly_rootfs = True
    one = server.launch(pod, config_of(server, NAME, linux=readonly))
    two = server.launch(pod, config_of(server, NAME, metadata=api.ContainerMetadata(name="two")))
    server.output(one, "sh", "-c", "echo mine > /data/file; rm /data/nested/inner")
    assert server.output(two, "cat", "/data/file", "/data/nested/inner") == "contentinner"
    folder = server.root / "containers" / one
    assert b"mine\n" in {p.read_bytes() for p in folder.rglob("file")}
    assert not server.status(one).mounts
    server.runtime.RemoveContainer(api.RemoveContainerRequest(container_id=one))
    assert not folder.exists()


def test_a_mount_at_a_volumes_path_replaces_the_volume(server_with_volumes: Server) -> None:
    server = server_with_volumes
    host = server.folder / "given"
    host.mkdir(exist_ok=True)
    (host / "given").touch()
    mounts = [api.Mount(container_path="/over/", host_path=str(host))]
    container = server.launch(server.run_pod(), config_of(server, NAME, mounts=mounts))
    assert server.output(container, "ls", "/over") == "given\n"
    volumes = server.root / "containers" / container / "volumes"
    assert len(list(volumes.iterdir())) == 3


@pytest.mark.parametrize(
    "place", ["/way", "/way/secret", "/../../../..{host}", "/absolute", "/proc/self/root{host}"]
)
def test_a_volumes_path_cannot_leave_the_image(server: Server, place: str) -> None:
    """CVE-2022-23648: an image declares a volume whose path leads to the host by links or `..`. The
    volume must not get files of the host."""
    host = server.folder / "secrets"
    (host / "secret").mkdir(parents=True, exist_ok=True)
    (host / "secret/key").write_text("the host's")
    (host / "key").write_text("the host's")
    files = {
        "way": symlink("../../../../../../../../.." + str(host)),
        "absolute": symlink(str(host)),
        **({f"{host}/secret/key".lstrip("/"): b"the image's"} if "proc" not in place else {}),
    }
    load(server, "registry.test/hostile:1", files, [place.format(host=host)])
    pod, config = server.run_pod(), config_of(server, "registry.test/hostile:1")
    try:
        container = server.create(pod, config)
    except grpc.RpcError as error:
        assert "/proc" in place and "/proc" in str(error.details())
        return
    copies = {
        p.read_text() for p in (server.root / "containers" / container / "volumes").rglob("key")
    }
    assert copies == (set() if "proc" in place else {"the image's"})


@pytest.mark.parametrize(
    ("place", "why"), [("/", "the root"), ("/file", "Not a directory"), ("/loop", "symbolic links")]
)
def test_an_error_names_a_volume_with_an_impossible_path(
    server: Server, place: str, why: str
) -> None:
    load(server, "registry.test/odd:1", {"file": b"", "loop": symlink("loop")}, [place])
    pod, config = server.run_pod(), config_of(server, "registry.test/odd:1")
    message = message_of(lambda: server.create(pod, config))
    assert f"volume {place!r}" in message and why in message
    assert code_of(lambda: server.create(pod, config)) == grpc.StatusCode.INVALID_ARGUMENT
    assert list((server.root / "containers").iterdir()) == []


def test_a_pod_with_a_user_namespace_can_have_volumes(server_with_volumes: Server) -> None:
    server = server_with_volumes
    mapping = [api.IDMapping(container_id=0, host_id=600_000, length=65_536)]
    users = api.UserNamespace(mode=api.POD, uids=mapping, gids=mapping)
    pod_config = server.pod_config()
    pod_config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    config = config_of(server, NAME)
    config.linux.security_context.namespace_options.userns_options.CopyFrom(users)
    container = server.launch(server.run_pod(pod_config), config)
    script = "touch /data/made; stat -c %u:%g /data /data/file /data/made"
    assert server.output(container, "sh", "-c", script).split() == ["7:8", "70:80", "0:0"]


def test_a_containers_disk_usage_includes_its_volumes(server_with_volumes: Server) -> None:
    server = server_with_volumes
    container = server.create(server.run_pod(), config_of(server, NAME))
    [volume] = [p.parent for p in Path(server.root / "containers" / container).rglob("again")]
    (volume / "big").write_bytes(os.urandom(1 << 20))
    stats = server.runtime.ContainerStats(api.ContainerStatsRequest(container_id=container)).stats
    assert stats.writable_layer.used_bytes.value >= 1 << 20
