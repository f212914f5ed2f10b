"""Tests that the kernel shows the expected labels on the server's pods, containers and volumes."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.security.selinux import policy
from cri_server.security.selinux.context import SelinuxContext
from tests.cri.server_harness import Server
from tests.vm.selinux.labels import file_label, label, pids, read

PROCESS = ("system_u", "system_r", "container_t")
FILE = ("system_u", "object_r", "container_file_t")


def parts(context: SelinuxContext) -> tuple[str, str, str]:
    return context.user, context.role, context.type


def options(**words: str) -> api.SELinuxOption:
    return api.SELinuxOption(**words)


def test_the_kernel_has_a_policy() -> None:
    kernel_policy = policy.probe()
    assert (
        kernel_policy is not None
        and parts(kernel_policy.process) == PROCESS
        and parts(kernel_policy.file) == FILE
    )
    assert kernel_policy.has_levels


@pytest.mark.requirement("8.10")
def test_levels_separate_pods(server: Server) -> None:
    first, second = server.run_pod(host_network=True), server.run_pod(host_network=True)
    levels = []
    for pod in (first, second):
        one, two = server.container_config(), server.container_config()
        two.metadata.name = "two"
        processes = [pids(server, server.launch(pod, config)) for config in (one, two)]
        labels = {label(pid) for pair in processes for pid in pair}
        assert len(labels) == 1, labels
        (process,) = labels
        assert parts(process) == PROCESS and process.level.startswith("s0:c")
        for path in (
            "/",
            "/bin/busybox",
            "/dev",
            "/dev/shm",
            "/dev/pts",
            "/etc/hosts",
            "/etc/resolv.conf",
        ):
            seen = file_label(processes[0][0], path)
            assert (parts(seen), seen.level) == (FILE, process.level), path
        levels.append(process.level)
    assert levels[0] != levels[1]


def test_an_exec_and_its_files_have_the_containers_label(server: Server) -> None:
    container = server.launch(server.run_pod(host_network=True))
    pid, _ = pids(server, container)
    assert read(server.output(container, "cat", "/proc/self/attr/current").encode()) == label(pid)
    server.output(container, "sh", "-c", "echo x >/written; mkdir /dev/mqueue/x 2>/dev/null; true")
    assert file_label(pid, "/written").level == label(pid).level
    assert (
        read(os.getxattr(f"/proc/{pid}/root/dev/mqueue", "security.selinux")).level
        == label(pid).level
    )


def test_processes_may_use_the_null_device_of_the_server(server: Server) -> None:
    """The standard input of a pause process and of an exec is still the server's null device, and
    not the kernel's replacement for a refused file."""
    container = server.launch(server.run_pod(host_network=True))
    stdin = f"/proc/{pids(server, container)[1]}/fd/0"
    assert os.readlink(stdin).endswith(" (deleted)")
    assert read(os.getxattr(stdin, "security.selinux")).type == "null_device_t"
    assert server.output(container, "readlink", "/proc/self/fd/0").endswith(" (deleted)\n")


@pytest.mark.requirement("8.10")
def test_a_pod_has_its_requested_label(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.selinux_options.CopyFrom(options(level="s0:c5,c6"))
    pod = server.run_pod(config, host_network=True)
    container = server.container_config()
    container.linux.security_context.selinux_options.CopyFrom(options(type="container_t"))
    pid, pause = pids(server, server.launch(pod, container))
    assert label(pid).level == label(pause).level == file_label(pid, "/").level == "s0:c5,c6"


def test_a_type_outside_of_the_policy_is_refused(server: Server) -> None:
    container = server.container_config()
    container.linux.security_context.selinux_options.CopyFrom(options(type="no_such_t"))
    with pytest.raises(grpc.RpcError, match="no_such_t"):
        server.launch(server.run_pod(host_network=True), container)


@pytest.mark.requirement("8.10")
def test_a_privileged_container_is_not_confined(server: Server) -> None:
    config = server.pod_config()
    config.linux.security_context.privileged = True
    pod = server.run_pod(config, host_network=True)
    container = server.container_config()
    container.linux.security_context.privileged = True
    pid, pause = pids(server, server.launch(pod, container))
    kernel_policy = policy.probe()
    assert kernel_policy is not None
    assert label(pid) == (kernel_policy.privileged or label(server.pid))
    assert parts(label(pause)) == PROCESS


@pytest.mark.requirement("6.12")
def test_a_volume_is_relabelled_on_request(server: Server, tmp_path: Path) -> None:
    for name in ("asked", "not"):
        (tmp_path / name / "deep").mkdir(parents=True)
    mounts = [
        api.Mount(
            container_path=f"/{name}",
            host_path=str(tmp_path / name),
            selinux_relabel=name == "asked",
        )
        for name in ("asked", "not")
    ]
    pid, _ = pids(
        server,
        server.launch(server.run_pod(host_network=True), server.container_config(mounts=mounts)),
    )
    assert file_label(pid, "/asked/deep") == file_label(pid, "/")
    assert file_label(pid, "/not/deep").type != FILE[2]


@pytest.mark.requirement("8.10")
def test_a_level_survives_a_restart(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    before, _ = pids(server, server.launch(pod))
    server.restart()
    second = server.container_config()
    second.metadata.name = "two"
    after, _ = pids(server, server.launch(pod, second))
    assert label(after) == label(before)
