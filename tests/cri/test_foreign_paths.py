"""Tests containers with host paths on storage that does not answer: only the call that needs the
storage waits."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import cli
from tests.cri.server_harness import Server, code_of, message_of
from tests.cri.test_transport import open_files
from tests.support import fuse
from tests.support.processes import wait_until

TIMEOUT_S = 3.0
SOON_S = 2.0
MAPPING = [api.IDMapping(host_id=0, container_id=0, length=1)]
MANY = 300  # more than the descriptors of one message


@contextlib.contextmanager
def started(cdi: Path) -> Iterator[Server]:
    settings = {"foreign_path_timeout_s": TIMEOUT_S, "cdi_dirs": [str(cdi)]}
    with Server(settings={"containers": settings}) as server:
        server.load_image()
        yield server


@pytest.fixture(scope="module")
def cdi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cdi")


@pytest.fixture(scope="module")
def module_server(cdi: Path) -> Iterator[Server]:
    with started(cdi) as server:
        yield server


@pytest.fixture
def volume(server: Server, tmp_path: Path) -> Iterator[fuse.Volume]:
    with mounted(server, tmp_path) as volume:
        yield volume


@contextlib.contextmanager
def mounted(server: Server, tmp_path: Path) -> Iterator[fuse.Volume]:
    """Mount a FUSE volume below a shared mount. At the end of the block it removes the server's
    pods, then the mounts."""
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "shared", shared], check=True)
    subprocess.run(["mount", "--make-shared", shared], check=True)
    try:
        with fuse.Volume(shared / "volume") as volume:
            yield volume
            volume.answer()
            server.remove_all()
    finally:
        subprocess.run(["umount", "--lazy", shared], check=True)


def container_config(server: Server, *mounts: api.Mount, name: str = "c") -> api.ContainerConfig:
    return server.container_config(mounts=mounts, metadata=api.ContainerMetadata(name=name))


def of(volume: fuse.Volume, **changes: object) -> api.Mount:
    return api.Mount(container_path="/v", host_path=str(volume.path), **changes)  # type: ignore[arg-type]


def is_open(server: Server, volume: fuse.Volume) -> bool:
    return str(volume.path) in open_files(server)


def test_a_volume_that_never_answers_is_named_in_time(
    server: Server, volume: fuse.Volume, tmp_path: Path
) -> None:
    """CreateContainer fails with the volume's path after the timeout and leaves nothing, even if
    the volume answers late; meanwhile another container is created."""
    pod, other = server.run_pod(), api.Mount(container_path="/other", host_path=str(tmp_path))
    server.remove_container(server.create(pod, container_config(server, other)))
    volume.hang()
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waits = pool.submit(
            code_and_message, server, pod, container_config(server, other, of(volume))
        )
        assert wait_until(lambda: volume.waiting, 30)
        second = time.monotonic()
        server.launch(pod, container_config(server, other, name="second"))
        assert time.monotonic() - second < SOON_S and not waits.done()
        code, message = waits.result(60)
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + SOON_S
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert (
        f"path '{volume.path}' did not answer within 3 s" in message
        and f"'{tmp_path}'" not in message
    )
    assert [c.metadata.name for c in server.containers()] == ["second"]
    assert (
        len(list(server.state.glob("containers/*")))
        == 1
        == len(list(server.root.glob("containers/*.json")))
    )
    assert is_open(server, volume)  # by the thread that waits
    volume.answer()
    assert wait_until(lambda: not is_open(server, volume), 30), open_files(server)
    container = server.launch(pod, container_config(server, of(volume)))
    assert server.output(container, "cat", "/v/file") == "mine\n"


def code_and_message(
    server: Server, pod: str, config: api.ContainerConfig
) -> tuple[grpc.StatusCode, str]:
    try:
        server.create(pod, config)
    except grpc.RpcError as error:
        return error.code(), str(error.details())  # type: ignore[attr-defined]
    raise AssertionError("the call succeeded")


@pytest.mark.parametrize("propagation", [api.PROPAGATION_PRIVATE, api.PROPAGATION_BIDIRECTIONAL])
def test_only_the_server_looks_up_the_volume(
    server: Server, volume: fuse.Volume, propagation: int
) -> None:
    """The volume gets a single request, from the server: compiling and launching the container
    cause none. No descriptor of the volume stays open."""
    pod = server.run_pod()
    volume.hang(after_looks=1)
    container = server.create(pod, container_config(server, of(volume, propagation=propagation)))
    # The container's process makes the mount, or the shim clones the descriptor.
    server.start_container(container)
    assert volume.requests == [fuse.GETATTR] and not volume.waiting
    assert not is_open(server, volume)
    volume.answer()
    assert server.output(container, "cat", "/v/file") == "mine\n"


def test_a_start_that_waits_for_the_volume_delays_no_other_start(
    server: Server, volume: fuse.Volume
) -> None:
    """While the start of a container waits for the volume, the shim starts another one."""
    pod = server.run_pod()
    # The container's process looks up a source below the volume's mount point once more.
    below = api.Mount(container_path="/v", host_path=str(volume.path / "file"))
    first = server.create(pod, container_config(server, below, name="first"))
    second = server.create(pod, container_config(server, name="second"))
    volume.hang()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(server.start_container, first)
        assert wait_until(lambda: volume.waiting, 30)
        began = time.monotonic()
        server.start_container(second)
        assert server.output(second, "echo", "mine") == "mine\n"
        assert time.monotonic() - began < SOON_S and not waits.done()
        volume.answer()
        waits.result(60)
    assert server.output(first, "cat", "/v") == "mine\n"


def test_an_exec_that_looks_up_its_home_on_the_volume_delays_no_other(
    server: Server, volume: fuse.Volume
) -> None:
    """An exec with an empty HOME waits for the volume, which has the passwd file; meanwhile the
    shim serves other calls."""
    pod = server.run_pod()
    passwd = api.Mount(container_path="/etc/passwd", host_path=str(volume.path / "file"))
    config = container_config(server, passwd, name="first")
    config.envs.append(api.KeyValue(key="HOME", value=b""))
    first = server.launch(pod, config)
    second = server.launch(pod, container_config(server, name="second"))
    show = ("sh", "-c", "echo $HOME")
    volume.hang()
    # This HOME was set when the container was created; the file has no line for the user.
    assert server.output(first, *show) == "/\n"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(cli, server, "exec", "-e", "HOME=", first, *show)
        assert wait_until(lambda: volume.waiting, 30)
        assert server.output(second, "echo", "mine") == "mine\n"
        server.stop_container(second)
        assert not waits.done()
        volume.answer()
        assert waits.result(60).stdout == b"/\n"


def test_a_pod_is_stopped_while_a_start_waits_for_the_volume(
    server: Server, volume: fuse.Volume
) -> None:
    pod = server.run_pod()
    below = api.Mount(container_path="/v", host_path=str(volume.path / "file"))
    container = server.create(pod, container_config(server, below))
    volume.hang()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(message_of, lambda: server.start_container(container))
        assert wait_until(lambda: volume.waiting, 30)
        server.stop_pod(pod)
        assert "the process was killed before it ran" in waits.result(60)
    assert server.status(container).state == api.CONTAINER_EXITED
    volume.answer()
    server.remove_pod(pod)


@pytest.mark.parametrize("answers", [True, False])
def test_mounts_of_a_cdi_device_follow_links(
    server: Server, volume: fuse.Volume, cdi: Path, answers: bool
) -> None:
    """If a CDI file names the volume by a symbolic link, the mount follows the link."""
    link = volume.path.with_name("link")
    link.symlink_to(volume.path)
    edits = {"mounts": [{"hostPath": str(link), "containerPath": "/v", "options": ["bind", "ro"]}]}
    device = {
        "cdiVersion": "0.6.0",
        "kind": "example.org/volume",
        "devices": [{"name": "one", "containerEdits": edits}],
    }
    (cdi / "volume.json").write_text(json.dumps(device))
    config = server.container_config(CDI_devices=[api.CDIDevice(name="example.org/volume=one")])
    pod = server.run_pod()
    volume.hang(after_looks=1 if answers else 0)
    if not answers:
        assert f"path '{link}' did not answer within 3 s" in message_of(
            lambda: server.create(pod, config)
        )
        return
    container = server.launch(pod, config)
    assert volume.requests == [fuse.GETATTR] and not is_open(server, volume)
    volume.answer()
    assert server.output(container, "cat", "/v/file") == "mine\n"


def test_an_id_mapping_error_does_not_query_the_volume(server: Server, volume: fuse.Volume) -> None:
    pod = server.run_pod()
    volume.hang(after_looks=1)
    mount = of(volume, uidMappings=MAPPING, gidMappings=MAPPING)
    assert "the filesystem may not support idmapped mounts" in message_of(
        lambda: server.create(pod, container_config(server, mount))
    )
    assert volume.requests == [fuse.GETATTR]
    assert not is_open(server, volume)


def test_a_start_after_a_restart_opens_the_volume_again(tmp_path: Path) -> None:
    """A restarted server looks up the volume once more, with the same timeout."""
    with started(tmp_path) as server, mounted(server, tmp_path) as volume:
        # The restarted server has no compiled launch of the container.
        starts_again(server, volume)


def starts_again(server: Server, volume: fuse.Volume) -> None:
    pod = server.run_pod()
    mount = of(volume, propagation=api.PROPAGATION_BIDIRECTIONAL)
    first, second = (
        server.create(pod, container_config(server, mount, name=name))
        for name in ("first", "second")
    )
    server.restart()
    volume.hang(after_looks=1)
    server.start_container(first)
    assert volume.requests == [fuse.GETATTR] and not is_open(server, volume)
    volume.hang()
    message = message_of(lambda: server.start_container(second))
    assert f"path '{volume.path}' did not answer within 3 s" in message
    volume.answer()
    assert server.output(first, "cat", "/v/file") == "mine\n"
    assert wait_until(lambda: not is_open(server, volume), 30)


def test_a_container_can_have_more_mounts_than_a_message_has_descriptors(
    server: Server, tmp_path: Path
) -> None:
    """Plain mounts have no limit. ID-mapped mounts have a limit, which the error names."""
    pod, mounts = server.run_pod(), []
    for number in range(MANY):
        (tmp_path / str(number)).mkdir()
        mounts.append(
            api.Mount(container_path=f"/v/{number}", host_path=str(tmp_path / str(number)))
        )
    container = server.launch(pod, container_config(server, *mounts))
    assert len(server.output(container, "ls", "/v").split()) == MANY
    # Unlike a mount by the container's process, each of these needs a descriptor.
    for mount in mounts:
        mount.uidMappings.extend(MAPPING)
        mount.gidMappings.extend(MAPPING)
    before = sorted(open_files(server))
    mapped = container_config(server, *mounts, name="mapped")
    assert "the limit is 249" in message_of(lambda: server.create(pod, mapped))
    assert code_of(lambda: server.create(pod, mapped)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert wait_until(lambda: sorted(open_files(server)) == before, 30)
