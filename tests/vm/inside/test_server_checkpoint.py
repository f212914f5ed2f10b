"""Tests checkpoints of a server's containers by the real CRIU: processes, files and listeners
continue where they were."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.client_verbs import call, ok
from tests.cri.conftest import server
from tests.cri.server_harness import IMAGE, Server, image_archive
from tests.support.oci_archives import oci_archive
from tests.support.processes import wait_until
from tests.vm.counting import (
    WORKLOAD,
    checkpoint,
    config,
    count,
    goes_on,
    module_server,
    restore,
    wait_beyond,
)

__all__ = ["module_server", "server"]

CHECKPOINT_IMAGE = "registry.test/checkpoint:1"


@pytest.mark.requirement("4.11.1", "13.19")
def test_a_container_continues_in_another_pod(server: Server, tmp_path: Path) -> None:
    first = server.launch(server.run_pod(), config(server))
    wait_beyond(server, first, 5)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    at_dump = count(server, first)
    wait_beyond(server, first, at_dump + 5)  # the first container continues, too
    again = restore(server, archive, config(server))
    assert wait_until(lambda: server.log_lines(again), 30)
    # its output continues, without a gap, in another log
    assert 5 < int(server.log_lines(again)[0]) <= at_dump + 1
    wait_beyond(server, again, at_dump)
    assert server.output(again, "cat", "/data/file") == "kept\n"
    assert "changed" in server.output(again, "cat", "/etc/passwd")
    assert "group" not in server.output(again, "ls", "/etc")
    assert sorted(os.listdir(server.root / "containers" / again)) == ["upper", "work"]
    status = server.status(again)
    assert status.image.image == IMAGE and status.state == api.CONTAINER_RUNNING
    server.stop_container(again)
    assert server.status(again).exit_code == 137
    assert count(server, first) > at_dump


@pytest.mark.requirement("4.11.1")
@pytest.mark.slow
def test_an_archive_has_the_documented_content(server: Server, tmp_path: Path) -> None:
    container = server.launch(server.run_pod(), config(server))
    wait_beyond(server, container, 1)
    with tarfile.open(checkpoint(server, container, tmp_path / "a.tar")) as archive:
        members = {member.name: member for member in archive}
        assert {
            "config.dump",
            "spec.dump",
            "status.dump",
            "status",
            "rootfs-diff.tar",
            "deleted.files",
            "bind.mounts",
            "dump.log",
            "stats-dump",
            "checkpoint",
            "checkpoint/inventory.img",
            "checkpoint/descriptors.json",
        } <= set(members)
        assert all(member.mode & 0o077 == 0 for member in members.values())

        def read(name: str) -> Any:
            content = archive.extractfile(name)
            assert content is not None
            return json.load(content)

        assert (
            read("config.dump")["rootfsImageName"] == IMAGE
            and read("config.dump")["id"] == container
        )
        assert read("spec.dump")["process"]["args"][0] == "sh"
        assert "/etc/group" in read("deleted.files")
        assert "/etc/hosts" in {mount["destination"] for mount in read("bind.mounts")}
        layer = archive.extractfile("rootfs-diff.tar")
        assert layer is not None
        with tarfile.open(fileobj=layer) as written:
            assert {"data/file", "etc/passwd"} <= set(written.getnames())


@pytest.mark.slow
def test_a_redirected_stream_continues_in_the_log(server: Server, tmp_path: Path) -> None:
    """At the checkpoint the shell's stdout and stderr are a file of the container; after the
    restore they are the log again."""
    wait = "until [ -e /go ]; do sleep 0.1; done >/own 2>/own"
    script = f"{wait}; while :; do echo after; sleep 0.1; done"
    first = server.launch(server.run_pod(), config(server, script))
    assert wait_until(lambda: "own" in server.output(first, "ls", "/"), 30, 0.2)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    again = restore(server, archive, config(server, script))
    server.output(again, "touch", "/go")
    assert wait_until(lambda: "after" in server.log_lines(again), 30, 0.2)


@pytest.mark.slow
def test_mounts_come_from_the_new_request(server: Server, tmp_path: Path) -> None:
    """The archive has no content of volumes: a restored container sees the volumes of its new
    pod."""
    volumes = [tmp_path / name for name in ("old", "new")]
    for volume in volumes:
        volume.mkdir()
        (volume / "name").write_text(volume.name)
    old, new = (
        config(server, mounts=[api.Mount(container_path="/volume", host_path=str(volume))])
        for volume in volumes
    )
    first = server.launch(server.run_pod(), old)
    wait_beyond(server, first, 1)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    assert server.output(restore(server, archive, new), "cat", "/volume/name") == "new"
    with pytest.raises(grpc.RpcError, match="had host mounts at /volume"):
        restore(server, archive, config(server))


@pytest.mark.slow
def test_image_volumes_are_restored(server: Server, tmp_path: Path) -> None:
    mounts = []
    for number, layers in enumerate(
        ([{"file": b"below"}], [{"file": b"below"}, {"file": b"above"}])
    ):
        image = f"registry.test/volume-of-layers:{number}"
        server.load_image(image_archive(image, *layers))
        place = f"/volume{number}"
        mounts.append(
            api.Mount(container_path=place, readonly=True, image=api.ImageSpec(image=image))
        )
    container = server.launch(server.run_pod(), config(server, mounts=mounts))
    wait_beyond(server, container, 5)
    archive = checkpoint(server, container, tmp_path / "a.tar")
    # The overlay of each volume is not in the archive and is made again.
    restored = restore(server, archive, config(server, mounts=mounts))
    assert server.output(restored, "cat", "/volume0/file", "/volume1/file") == "belowabove"
    assert server.exec(restored, "touch", "/volume0/new").exit_code == 1
    goes_on(server, restored)


def test_a_swapped_mount_source_is_not_mounted(server: Server, tmp_path: Path) -> None:
    """CVE-2021-25741: before CRIU mounts a host path, a link takes its place. The restored
    container must see the original folder. A mounted file is tested, too."""
    folder, file, secret = (tmp_path / name for name in ("folder", "file", "secret"))
    for path in (folder, secret):
        path.mkdir()
        (path / "name").write_text(path.name)
    file.write_text("a file")
    mounts = [
        api.Mount(container_path=f"/v/{path.name}", host_path=str(path)) for path in (folder, file)
    ]
    first = server.launch(server.run_pod(), config(server, mounts=mounts))
    wait_beyond(server, first, 1)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    request = config(server, image=api.ImageSpec(image=str(archive)), mounts=mounts)
    again = server.create(server.run_pod(), request)
    folder.rename(tmp_path / "taken")
    folder.symlink_to(secret)
    server.start_container(again)
    assert server.output(again, "cat", "/v/folder/name", "/v/file") == "foldera file"


@pytest.mark.slow
def test_an_image_with_the_annotation_is_restored(server: Server, tmp_path: Path) -> None:
    """The image has the annotation org.criu.checkpoint.container.name."""
    first = server.launch(server.run_pod(), config(server))
    wait_beyond(server, first, 3)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    # A layer with the files of the archive, as `buildah add` makes it.
    image = build.image([archive.read_bytes()])
    annotations = {"org.criu.checkpoint.container.name": "c"}
    server.load_image(oci_archive({CHECKPOINT_IMAGE: image}, annotations=annotations))
    again = restore(server, CHECKPOINT_IMAGE, config(server))
    wait_beyond(server, again, 3)
    assert server.status(again).image.image == IMAGE


@pytest.mark.slow
def test_anonymous_volumes_are_part_of_the_archive(server: Server, tmp_path: Path) -> None:
    """A VOLUME of the image belongs to one container, so the archive has its content."""
    reference = "registry.test/volume:1"
    files = {
        name: Path("/bin/busybox").read_bytes()
        for name in ("bin/sh", "bin/cat", "bin/sleep", "bin/mv", "bin/rm", "bin/mkdir")
    }
    layer = build.layer(
        {name: build.LayerFile(content, mode=0o755) for name, content in files.items()}
        | {"state/of-image": b"x"}
    )
    server.load_image(
        build.docker_archive({reference: build.image([layer], {"Volumes": {"/state": {}}})})
    )
    script = (
        "rm /state/of-image; echo mine > /state/file; i=0; while :; do i=$((i+1)); echo $i >"
        " /count; sleep 0.05; done"
    )
    container_config = config(server, script, image=api.ImageSpec(image=reference))
    first = server.launch(server.run_pod(), container_config)
    wait_beyond(server, first, 2)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    again = restore(server, archive, container_config)
    wait_beyond(server, again, 2)
    assert (
        server.output(again, "sh", "-c", "cat /state/file; echo /state/*") == "mine\n/state/file\n"
    )


@pytest.mark.slow
def test_a_container_with_a_terminal_is_restored(server: Server, tmp_path: Path) -> None:
    container_config = config(server, tty=True)
    first = server.launch(server.run_pod(), container_config)
    wait_beyond(server, first, 2)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    again = restore(server, archive, container_config)
    at = count(server, again)
    wait_beyond(server, again, at)
    assert wait_until(lambda: str(at + 1) in server.log_lines(again), 30)


@pytest.mark.slow
def test_a_restored_container_is_limited_and_confined_again(server: Server, tmp_path: Path) -> None:
    container_config = config(server)
    container_config.linux.resources.memory_limit_in_bytes = 128 << 20
    container_config.linux.security_context.no_new_privs = True
    container_config.linux.security_context.seccomp.profile_type = (
        api.SecurityProfile.RuntimeDefault
    )
    container_config.linux.security_context.masked_paths.extend(["/proc/kcore", "/sys/firmware"])
    container_config.linux.security_context.readonly_paths.append("/proc/sys")
    first = server.launch(server.run_pod(), container_config)
    wait_beyond(server, first, 2)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    container_config.linux.resources.memory_limit_in_bytes = 96 << 20
    again = restore(server, archive, container_config)
    info = json.loads(
        server.runtime.ContainerStatus(
            api.ContainerStatusRequest(container_id=again, verbose=True)
        ).info["info"]
    )
    lines = Path(f"/proc/{info['pid']}/status").read_text().splitlines()
    assert "NoNewPrivs:\t1" in lines and "Seccomp:\t2" in lines
    group = Path(f"/proc/{info['pid']}/cgroup").read_text().strip().rpartition(":")[2]
    assert again in group
    limit = Path(f"/sys/fs/cgroup{group}/memory.max")
    if limit.exists():  # not on a hybrid host
        assert int(limit.read_text()) == 96 << 20
    assert (
        "Read-only"
        in server.exec(again, "sh", "-c", "echo x > /proc/sys/kernel/hostname").stderr.decode()
    )


def test_restored_listeners_listen_and_restored_connections_are_closed(
    server: Server, tmp_path: Path
) -> None:
    """The new pod has another address: clients of the first pod stay with that pod, and none is
    connected to the new one."""
    script = (
        "mkdir /www && echo hello > /www/index.html; httpd -p 8080 -h /www; (sleep 10000 | nc"
        " 127.0.0.1 8080) & " + WORKLOAD
    )
    first = server.launch(server.run_pod(), config(server, script))
    wait_beyond(server, first, 2)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    again = restore(server, archive, config(server, script))
    wait_beyond(server, again, 2)
    for container in (first, again):
        assert server.output(container, "wget", "-qO-", "http://127.0.0.1:8080/") == "hello\n"


@pytest.mark.slow
def test_a_damaged_checkpoint_starts_no_process(server: Server, tmp_path: Path) -> None:
    first = server.launch(server.run_pod(), config(server))
    wait_beyond(server, first, 1)
    archive = checkpoint(server, first, tmp_path / "a.tar")
    folder = tmp_path / "content"
    folder.mkdir()
    subprocess.run(["tar", "xf", archive, "-C", folder], check=True)
    (folder / "checkpoint/core-1.img").write_bytes(b"damaged")
    subprocess.run(["tar", "cf", archive, "-C", folder, "."], check=True)
    with pytest.raises(grpc.RpcError, match="criu failed"):
        restore(server, archive, config(server))
    ended = [c for c in server.containers() if c.state == api.CONTAINER_EXITED]
    assert len(ended) == 1 and server.status(ended[0].id).reason == "StartError"


@pytest.mark.requirement("4.12.1", "4.12.2")
def test_a_pod_is_checkpointed_as_a_whole(server: Server, tmp_path: Path) -> None:
    """A reader and a writer share memory: after the restore the reader never has a number that the
    writer has not yet written."""
    writer = (
        "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/next; mv /dev/shm/next /dev/shm/n; echo $i"
        " > /next; mv /next /count; sleep 0.02; done"
    )
    reader = "while :; do cat /dev/shm/n > /next 2>/dev/null && mv /next /count; sleep 0.02; done"
    configs = []
    for name, script in (("writer", writer), ("reader", reader)):
        container_config = config(server, script, log_path=f"{name}.log")
        container_config.metadata.name = name
        configs.append(container_config)
    pod = server.run_pod()
    containers = [server.launch(pod, container_config) for container_config in configs]
    for container in containers:
        wait_beyond(server, container, 10)
    folder = tmp_path / "pod"
    folder.mkdir()
    server.runtime.CheckpointPod(
        api.CheckpointPodRequest(
            pod_sandbox_id=pod, output_path=str(folder), container_ids=containers
        ),
        timeout=300,
    )
    names = {"pod.options", "pod.dump", "devshm-checkpoint.tar", *(f"{c}.tar" for c in containers)}
    assert {path.name for path in folder.iterdir()} == names
    for container in containers:
        wait_beyond(server, container, count(server, container))
    new = server.pod_config()
    answer = server.runtime.RestorePod(
        api.RestorePodRequest(checkpoint_path=str(folder), config=new, container_configs=configs),
        timeout=120,
    )
    again = {restored.name: restored.container_id for restored in answer.restored_containers}
    assert {server.status(c).state for c in again.values()} == {api.CONTAINER_CREATED}
    assert server.pod_status(answer.pod_sandbox_id).network.ip != server.pod_status(pod).network.ip
    server.start_container(again["reader"])
    assert wait_until(lambda: count(server, again["reader"]) > 0, 30)
    still = server.output(again["reader"], "cat", "/dev/shm/n")  # the writer does not run yet
    assert count(server, again["reader"]) <= int(still)
    server.start_container(again["writer"])
    wait_beyond(server, again["writer"], int(still))
    wait_beyond(server, again["reader"], int(still))
    assert count(server, containers[0]) > int(still)


@pytest.mark.slow
def test_the_commands_checkpoint_and_run(server: Server, tmp_path: Path) -> None:
    """`pyrunc-cri run` takes an archive of `pyrunc-cri checkpoint` in place of an image."""
    pod = server.run_pod(server.pod_config("verb"))
    container = server.launch(pod, config(server))
    wait_beyond(server, container, 3)
    archive, folder = tmp_path / "a.tar", tmp_path / "pod"
    assert ok(server, "checkpoint", "verb/c", "--export", str(archive)).lines == [str(archive)]
    assert ok(server, "checkpoint", "verb", "--export", str(folder)).lines == [str(folder)]
    assert (folder / "pod.options").exists() and f"{archive} exists" in call(
        server, "checkpoint", "verb/c", "-e", str(archive)
    ).error
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "again"},
        "spec": {"containers": [{"name": "c", "image": str(archive)}]},
    }
    (tmp_path / "pod.yaml").write_text(json.dumps(manifest))
    ok(server, "run", str(tmp_path / "pod.yaml"))
    (again,) = ok(server, "ps", "-q", "--no-trunc", "--pod", "again").lines
    wait_beyond(server, again, 10)


@pytest.mark.slow
def test_a_restored_container_can_be_checkpointed_again(server: Server, tmp_path: Path) -> None:
    container_config = config(server)
    container = server.launch(server.run_pod(), container_config)
    for generation in range(2):
        wait_beyond(server, container, 3)
        archive = checkpoint(server, container, tmp_path / f"{generation}.tar")
        at_dump = count(server, container)
        container_config.image.image = str(archive)
        container = server.create(server.run_pod(), container_config)
        # The next server starts the container that the killed one has created.
        server.restart(Server.kill)
        server.start_container(container)
        wait_beyond(server, container, at_dump)
        assert server.output(container, "cat", "/data/file") == "kept\n"


def test_a_checkpoint_needs_a_pod_with_the_same_kind_of_network(
    server: Server, tmp_path: Path
) -> None:
    pods = {host: server.run_pod(host_network=host) for host in (True, False)}
    archives = {}
    for host, pod in pods.items():
        container = server.launch(pod, config(server))
        wait_beyond(server, container, 5)
        archives[host] = checkpoint(server, container, tmp_path / f"{host}.tar")
    for host, words in (
        (True, "used the host's network namespace"),
        (False, "used its pod's network namespace"),
    ):
        container_config = config(server, log_path=f"{host}.log")
        container_config.metadata.name = f"again-{host}".lower()
        container_config.image.image = str(archives[host])
        # Here CRIU would leave the container in the host's network, or find no network namespace.
        with pytest.raises(grpc.RpcError, match=words):
            server.create(pods[not host], container_config)
        goes_on(server, server.launch(pods[host], container_config))
