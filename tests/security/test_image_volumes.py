"""Attacks of a container on the server's folders and files that are mounted into it, with each
image store.

A layer on the node's disk belongs to all images that have it, and to the next pod. The containers
here have CAP_SYS_ADMIN and no user namespace, so they can clear mount flags (`ro`, `nosuid`). They
cannot change a superblock that the kernel keeps read-only.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.server_harness import Server

ONE_LAYER, TWO_LAYERS = "registry.test/volume:one", "registry.test/volume:two"
CONTENT = b"as it was pulled\n"
_numbers = itertools.count(1)

READ_WRITE, READ, NONE, ANY_ID = 6, 4, 0, 0xFFFFFFFF
# version and entries of include/uapi/linux/posix_acl_xattr.h
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in (
        (0x01, READ_WRITE, ANY_ID),  # the owner
        (0x02, NONE, 1000),  # the user 1000
        (0x04, READ, ANY_ID),  # the group
        (0x10, READ, ANY_ID),  # the mask
        (0x20, NONE, ANY_ID),  # others
    )
)
DENIED = build.LayerFile(
    CONTENT,
    0o640,
    pax={"SCHILY.xattr.system.posix_acl_access": ACL.decode("utf-8", "surrogateescape")},
)

CHANGE = """
mount -o remount,bind,rw {place}
mount -o remount,rw {place}
mkdir -p /mnt/copy && mount --bind {place} /mnt/copy && mount -o remount,bind,rw /mnt/copy
for file in {place}/data /mnt/copy/data; do echo changed > $file; chmod 777 $file; done
touch {place}/new /mnt/copy/new
echo done
"""


@pytest.fixture(scope="module", params=["unpacked", "erofs"])
def server(request: pytest.FixtureRequest, probe: Path) -> Iterator[Server]:
    """Provide a server with each image store: `unpacked` or `erofs`."""
    with Server(network=False, settings={"images": {"store": request.param}}) as server:
        server.load_image()
        files: dict[str, build.LayerFile | bytes | str] = {
            "data": CONTENT,
            "folder/data": CONTENT,
            "denied": DENIED,
            "probe": build.LayerFile(probe.read_bytes(), 0o4755),
        }
        one, two = [build.layer(files)], [build.layer(files), build.layer({"above": b""})]
        for name, layers in ((ONE_LAYER, one), (TWO_LAYERS, two)):
            server.load_image(build.docker_archive({name: build.image(layers)}))
        yield server


@pytest.fixture
def pod(server: Server) -> Iterator[str]:
    yield server.run_pod(host_network=True)
    server.remove_all()


def launch(server: Server, pod: str, *mounts: api.Mount, admin: bool = False, user: int = 0) -> str:
    """Start a container with `mounts`; return its id."""
    security = api.LinuxContainerSecurityContext(run_as_user=api.Int64Value(value=user))
    if admin:
        security.capabilities.add_capabilities.append("SYS_ADMIN")
    config = server.container_config(
        mounts=mounts, linux=api.LinuxContainerConfig(security_context=security)
    )
    config.metadata.name = f"c{next(_numbers)}"
    return server.launch(pod, config)


def volume(place: str, image: str, sub_path: str = "") -> api.Mount:
    return api.Mount(
        container_path=place,
        readonly=True,
        image=api.ImageSpec(image=image),
        image_sub_path=sub_path,
    )


VOLUMES = [
    pytest.param(ONE_LAYER, "", id="one layer"),
    pytest.param(TWO_LAYERS, "", id="two layers"),
    pytest.param(TWO_LAYERS, "folder", id="a folder that one layer has"),
]


@pytest.mark.parametrize(("image", "sub_path"), VOLUMES)
def test_a_remounted_image_volume_is_not_written_to(
    server: Server, pod: str, image: str, sub_path: str
) -> None:
    """A container with CAP_SYS_ADMIN remounts an image volume, and binds it elsewhere, to change a
    layer that other images share. Content, modes and names stay as pulled, in another pod's volume
    and in the store."""
    attacker = launch(server, pod, volume("/volume", image, sub_path), admin=True)
    assert server.output(attacker, "cat", "/volume/data").encode() == CONTENT
    before = server.output(attacker, "ls", "-l", "/volume")
    assert "done" in server.output(attacker, "sh", "-c", f"({CHANGE.format(place='/volume')}) 2>&1")
    victim = launch(server, server.run_pod(host_network=True), volume("/v", image, sub_path))
    assert server.output(victim, "cat", "/v/data").encode() == CONTENT
    assert server.output(victim, "ls", "-l", "/v") == before
    trees = [
        path for path in (server.root / "images/layers").rglob("*") if path.name in ("data", "new")
    ]
    assert all(
        path.read_bytes() == CONTENT and path.stat().st_mode & 0o777 == 0o644 for path in trees
    )


@pytest.mark.parametrize(("image", "sub_path"), VOLUMES[:2])
def test_a_set_uid_file_of_an_image_volume_has_no_effect(
    server: Server, pod: str, image: str, sub_path: str
) -> None:
    """A process of uid 1000 executes a set-uid file of root in an image volume. Its effective uid
    stays 1000; the same file in a container's own root does change it."""
    container = launch(server, pod, volume("/volume", image, sub_path), user=1000)
    assert server.output(container, "/volume/probe", "uid") == "1000\n"
    program = server.container_config(
        ["/probe", "uid"], image=api.ImageSpec(image=image), log_path="own.log"
    )
    program.metadata.name = "own"
    program.linux.security_context.run_as_user.value = 1000
    own = server.launch(pod, program)
    server.wait_exit(own)
    assert server.log_lines(own) == ["0"]


@pytest.mark.parametrize(
    "option", ["noacl", "nouser_xattr", "cache_strategy=disabled", "dax=always"]
)
def test_a_remount_does_not_change_a_shared_image_of_other_pods(
    server: Server, pod: str, option: str
) -> None:
    """Containers of an image share a superblock, and one with CAP_SYS_ADMIN remounts it with other
    options, such as `noacl`. In the volumes of other pods the image's ACL still denies access, and
    the mount table stays the same."""
    place = volume("/volume", ONE_LAYER)
    victim = launch(server, server.run_pod(host_network=True), place, user=1000)
    table = server.output(victim, "cat", "/proc/self/mountinfo")
    attacker = launch(server, pod, place, admin=True)
    for options in (option, f"ro,{option}"):
        server.exec(attacker, "mount", "-o", f"remount,{options}", "/volume")
    assert server.output(victim, "cat", "/proc/self/mountinfo") == table
    late = launch(server, pod, place, user=1000)
    for container in (victim, late):
        refused = server.exec(container, "cat", "/volume/denied")
        assert refused.exit_code == 1 and b"Permission denied" in refused.stderr
    assert server.output(attacker, "cat", "/volume/denied").encode() == CONTENT


def test_a_container_sees_only_bound_files_of_the_nodes_disk(server: Server, pod: str) -> None:
    """In the container's mount table only four mounts are of the node's disk: the pod's three files
    in /etc, with noexec, nosuid and nodev, and the volume that the image declares."""
    declaring = "registry.test/declares:1"
    layers = [*build.busybox().layers]
    server.load_image(
        build.docker_archive({declaring: build.image(layers, {"Volumes": {"/data": {}}})})
    )
    config = server.container_config(
        mounts=[
            volume("/one", ONE_LAYER),
            volume("/two", TWO_LAYERS),
            volume("/part", ONE_LAYER, "folder"),
        ],
        image=api.ImageSpec(image=declaring),
    )
    container = server.launch(pod, config)
    device = server.root.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = [
        line.split()
        for line in server.output(container, "cat", "/proc/self/mountinfo").splitlines()
    ]
    flags = {fields[4]: set(fields[5].split(",")) for fields in lines if fields[2] == number}
    quiet = {"nosuid", "nodev", "noexec"}
    assert {place: options & quiet for place, options in flags.items()} == {
        "/data": set(),
        "/etc/hosts": quiet,
        "/etc/hostname": quiet,
        "/etc/resolv.conf": quiet,
    }
