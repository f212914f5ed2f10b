"""Tests the actions that the kernel refuses to containers: access to files that are not theirs, and
to objects of another pod.

All containers are root, with every default capability, so that owners and modes refuse nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.vm.selinux.conftest import ENFORCE
from tests.vm.selinux.labels import label, pids

REFUSED = "Permission denied"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Return a folder of the host with a file, with the host's labels."""
    folder = tmp_path / "volume"
    folder.mkdir()
    (folder / "file").write_text("content")
    return folder


@contextlib.contextmanager
def permissive() -> Iterator[None]:
    ENFORCE.write_text("0")
    try:
        yield
    finally:
        ENFORCE.write_text("1")


def launch(
    server: Server, volume: Path, *, relabel: bool, level: str = "", host_pid: bool = False
) -> str:
    """Start a container in its own pod with the volume at /volume."""
    pod = server.pod_config()
    if level:
        pod.linux.security_context.selinux_options.CopyFrom(api.SELinuxOption(level=level))
    mount = api.Mount(container_path="/volume", host_path=str(volume), selinux_relabel=relabel)
    config = server.container_config(mounts=[mount])
    if host_pid:
        for context in (pod.linux.security_context, config.linux.security_context):
            context.namespace_options.pid = api.NODE
    return server.launch(server.run_pod(pod, host_network=True), config)


def output_of(server: Server, container: str, *command: str) -> str:
    """Return the output of a command, on stdout or stderr."""
    answer = server.exec(container, *command)
    return (answer.stdout + answer.stderr).decode()


def reads(server: Server, container: str) -> str:
    return output_of(server, container, "cat", "/volume/file")


def test_the_kernel_enforces_selinux_and_containers_work(server: Server, volume: Path) -> None:
    assert ENFORCE.read_text() == "1"
    container = launch(server, volume, relabel=False)
    process, pause = pids(server, container)
    assert label(process).type == label(pause).type == "container_t"
    script = """set -e
        cat /etc/hosts /etc/resolv.conf /proc/self/status /proc/1/cmdline \
/sys/fs/cgroup/cgroup.controllers >/written
        head -c 1 /dev/urandom >/dev/null
        mkdir /dev/shm/folder
        echo fine"""
    answer = server.exec(container, "sh", "-c", script)
    assert (answer.stdout, answer.stderr, answer.exit_code) == (b"fine\n", b"", 0)


@pytest.mark.requirement("6.12")
def test_a_volume_is_inaccessible_before_its_relabelling(server: Server, volume: Path) -> None:
    container = launch(server, volume, relabel=False)
    assert REFUSED in reads(server, container)
    assert REFUSED in output_of(server, container, "touch", "/volume/new")
    with permissive():
        assert reads(server, container) == "content"
    container = launch(server, volume, relabel=True)
    assert reads(server, container) == "content"
    assert output_of(server, container, "touch", "/volume/new") == "" and (volume / "new").exists()


@pytest.mark.requirement("8.10")
def test_pods_cannot_read_each_others_volumes(server: Server, volume: Path) -> None:
    """The kernel refuses it because the pods' labels, of the same type, differ in their
    categories."""
    first = launch(server, volume, relabel=True)
    assert reads(server, first) == "content"
    second = launch(server, volume, relabel=False)
    assert REFUSED in reads(server, second) and reads(server, first) == "content"
    launch(server, volume, relabel=True)  # from now on the volume belongs to the third container
    assert REFUSED in reads(server, first)


def test_pods_of_the_same_level_share_a_volume(server: Server, volume: Path) -> None:
    first = launch(server, volume, relabel=True, level="s0:c5,c6")
    second = launch(server, volume, relabel=False, level="s0:c5,c6")
    assert reads(server, first) == reads(server, second) == "content"


@pytest.mark.requirement("8.10")
def test_pods_cannot_signal_each_other(server: Server, volume: Path) -> None:
    """The kernel refuses the signal even in the host's pid namespace, where pods see each other."""
    first, second = (launch(server, volume, relabel=False, host_pid=True) for _ in range(2))
    process, _ = pids(server, first)
    assert REFUSED in output_of(server, second, "kill", "-9", str(process))
    assert server.status(first).state == api.CONTAINER_RUNNING
    with permissive():
        assert output_of(server, second, "kill", "-9", str(process)) == ""
    assert server.wait_exit(first).exit_code == 137
