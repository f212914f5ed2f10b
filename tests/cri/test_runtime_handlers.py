"""Tests runtime handlers: external OCI runtimes by their command line, and pyrunc with other
settings.

Containers behave the same under each handler: output, exit codes, exec, terminals, stop,
statistics, a restart of the server. The programs are real: runc, and the command `pyrunc`, used as
an external runtime.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, REPOSITORY, RPC_TIMEOUT_S, Server, code_of, message_of
from tests.cri.test_recovery import shim_pid
from tests.support import session, toolchain
from tests.support.processes import wait_until

# crun refuses hosts with both versions of cgroups.
OTHERS = ("runc", "command")
TRAP = ("sh", "-c", "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 1 & wait $!; done")


def binaries() -> dict[str, str]:
    return {
        "runc": str(toolchain.runc()),
        "command": str(REPOSITORY / ".venv" / "bin" / "pyrunc"),
    }


def settings() -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {
        f"runtimes.{n}": {"binary": b} for n, b in binaries().items()
    }
    values["runtimes.command"]["arguments"] = ["--missing-controllers", "warn"]
    values["runtimes.writable"] = {"cgroup_writable": True, "default_capabilities": ["CAP_CHOWN"]}
    values["runtimes.bare"] = {"privileged_without_host_devices": True}
    values["runtimes.gone"] = {"binary": "/no/such/program"}
    return values


@pytest.fixture(scope="module", autouse=True)
def no_groups_of_v1() -> Iterator[None]:
    """Check that the tests leave no groups of cgroup v1."""
    before = groups_of_v1()
    yield
    # The ledger counts only groups of cgroup v2.
    assert wait_until(lambda: groups_of_v1() <= before, 30), groups_of_v1() - before


def groups_of_v1() -> set[str]:
    folders = Path("/sys/fs/cgroup").glob(f"*/{session.name('pyrunc')}-*")
    return {str(group) for group in folders if group.parent.name != "unified"}


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    with Server(settings=settings()) as server:
        server.load_image()
        yield server


@pytest.fixture
def own_server() -> Iterator[Server]:
    """Provide a server for tests that end it."""
    with Server(settings=settings()) as server:
        server.load_image()
        yield server


def run_pod(server: Server, handler: str, **changes: Any) -> str:
    request = api.RunPodSandboxRequest(config=server.pod_config(**changes), runtime_handler=handler)
    return str(server.runtime.RunPodSandbox(request, timeout=RPC_TIMEOUT_S).pod_sandbox_id)


def runtime_folder(server: Server, container: str) -> Path:
    return server.state / "containers" / container / "runtime"


@pytest.mark.parametrize("handler", OTHERS)
def test_a_container_of_another_runtime_runs_and_is_removed(server: Server, handler: str) -> None:
    pod = run_pod(server, handler)
    assert server.pod_status(pod).runtime_handler == handler
    container = server.launch(
        pod, server.container_config(TRAP, envs=[api.KeyValue(key="K", value=b"v")])
    )
    server.wait_logged(container, "ready")
    assert any(runtime_folder(server, container).iterdir())  # the external runtime ran it
    assert server.output(container, "sh", "-c", "echo $K; cat /etc/hostname") == f"v\n{pod[:12]}\n"
    assert server.exec(container, "sh", "-c", "echo e >&2; exit 3").exit_code == 3
    assert (
        code_of(lambda: server.exec(container, "no-such-program"))
        == grpc.StatusCode.INVALID_ARGUMENT
    )
    stats = server.runtime.ContainerStats(api.ContainerStatsRequest(container_id=container)).stats
    assert stats.cpu.usage_core_nano_seconds.value > 0
    server.stop_container(container, timeout_s=30)
    status = server.wait_exit(container)
    assert (status.exit_code, status.reason) == (7, "Error")
    assert server.log_lines(container) == ["ready", "bye"]
    server.remove_container(container)
    assert not runtime_folder(server, container).exists()


@pytest.mark.parametrize("handler", OTHERS)
def test_a_source_swapped_before_its_mount_is_not_followed(
    server: Server, handler: str, tmp_path: Path
) -> None:
    """CVE-2021-25741: a program that may write to the folder of a host path replaces the path by a
    link before the external runtime mounts it. The container must get the original folder or
    file."""
    secret, folder, file = tmp_path / "secret", tmp_path / "folder", tmp_path / "file"
    secret.mkdir()
    (folder / "below").mkdir(parents=True)
    file.write_text("a file\n")
    (secret / "file").write_text("secret\n")
    (folder / "file").write_text("mine\n")
    mounts = [api.Mount(container_path=f"/v/{p.name}", host_path=str(p)) for p in (folder, file)]
    pod = run_pod(server, handler)
    subprocess.run(["mount", "-t", "tmpfs", "below", folder / "below"], check=True)
    try:
        (folder / "below" / "file").write_text("below\n")
        words = ("cat", "/v/folder/file", "/v/file", "/v/folder/below/file")
        container = server.create(pod, server.container_config(words, mounts=mounts))
        folder.rename(tmp_path / "taken")
        folder.symlink_to(secret)
        server.start_container(container)
        server.wait_exit(container)
        assert server.log_lines(container) == ["mine", "a file", "below"]
    finally:
        subprocess.run(["umount", tmp_path / "taken" / "below"], check=True)


@pytest.mark.parametrize("handler", OTHERS)
def test_the_pods_namespaces_and_dev_shm_are_shared(server: Server, handler: str) -> None:
    pod = run_pod(server, handler)
    config = server.container_config(metadata=api.ContainerMetadata(name="first"))
    other = server.container_config(metadata=api.ContainerMetadata(name="second"))
    first, second = server.launch(pod, config), server.launch(pod, other)
    server.output(first, "sh", "-c", "echo text >/dev/shm/file; mkdir /mnt; echo own >/mnt/file")
    assert server.output(second, "cat", "/dev/shm/file") == "text\n"
    assert server.exec(second, "test", "-e", "/mnt/file").exit_code == 1
    for kind in ("net", "ipc", "uts"):
        link = ("readlink", f"/proc/self/ns/{kind}")
        assert server.output(first, *link) == server.output(second, *link)
    mounted = Path("/proc/self/mountinfo").read_text()
    assert str(server.state) not in mounted  # the host has none of its mounts


@pytest.mark.parametrize("handler", OTHERS)
def test_containers_of_another_runtime_survive_a_restart_of_the_server(
    own_server: Server, handler: str
) -> None:
    server = own_server
    pod = run_pod(server, handler)
    running = server.launch(pod, server.container_config(TRAP))
    created = server.create(
        pod, server.container_config(metadata=api.ContainerMetadata(name="created"))
    )
    server.wait_logged(running, "ready")
    server.restart()
    assert server.status(running).state == api.CONTAINER_RUNNING
    assert server.output(running, "echo", "still") == "still\n"
    server.start_container(created)
    assert server.output(created, "echo", "new") == "new\n"
    server.stop_container(running, timeout_s=30)
    assert server.wait_exit(running).exit_code == 7
    server.remove_container(running)
    server.remove_container(created)


def test_another_shim_takes_over_a_container_of_another_runtime(own_server: Server) -> None:
    """The shim that takes over a container of runc stops and removes the container through runc."""
    server = own_server
    pod = run_pod(server, "runc")
    container = server.launch(pod, server.container_config(TRAP))
    server.wait_logged(container, "ready")
    before = shim_pid(server, pod)
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: shim_pid(server, pod) != before, 60)
    server.stop_container(container, timeout_s=30)
    server.wait_exit(container)
    server.wait_logged(container, "bye")
    server.remove_container(container)
    assert not runtime_folder(server, container).exists()


@pytest.mark.parametrize("handler", OTHERS)
def test_a_container_of_another_runtime_can_have_a_terminal(server: Server, handler: str) -> None:
    pod = run_pod(server, handler)
    container = server.launch(
        pod, server.container_config(("sh", "-c", "test -t 1 && echo yes; sleep 3600"), tty=True)
    )
    server.wait_logged(container, "yes")
    server.stop_container(container)


@pytest.mark.parametrize("handler", OTHERS)
def test_a_missing_program_is_a_start_error(server: Server, handler: str) -> None:
    pod = run_pod(server, handler)
    container = server.create(pod, server.container_config(("no-such-program",)))
    assert "no-such-program" in message_of(lambda: server.start_container(container))
    status = server.status(container)
    assert (status.state, status.exit_code, status.reason) == (
        api.CONTAINER_EXITED,
        128,
        "StartError",
    )


@pytest.mark.parametrize("handler", OTHERS)
def test_a_container_killed_from_outside_leaves_nothing(server: Server, handler: str) -> None:
    pod = run_pod(server, handler)
    container = server.launch(pod, server.container_config(("sh", "-c", "sleep 1000 & sleep 2000")))
    pids = json.loads(
        server.runtime.ContainerStatus(
            api.ContainerStatusRequest(container_id=container, verbose=True), timeout=RPC_TIMEOUT_S
        ).info["info"]
    )["pid"]
    os.kill(pids, 9)
    assert server.wait_exit(container).exit_code == 137
    server.remove_container(container)
    assert wait_until(lambda: not list(Path("/sys/fs/cgroup").rglob(container)), 30)


def test_a_missing_runtime_is_an_error(server: Server) -> None:
    pod = run_pod(server, "gone")
    container = server.create(pod)
    assert "/no/such/program" in message_of(lambda: server.start_container(container))
    assert server.status(container).state == api.CONTAINER_EXITED


@pytest.mark.requirement("10.5.2")
def test_status_lists_the_handlers_and_their_features(server: Server) -> None:
    answer = server.runtime.Status(api.StatusRequest(), timeout=RPC_TIMEOUT_S)
    features = {h.name: h.features for h in answer.runtime_handlers}
    assert set(features) == {"", "pyrunc", *OTHERS, "writable", "bare", "gone"}
    assert all(features[name].user_namespaces for name in ("", "pyrunc", "writable", "bare"))
    assert not any(features[name].user_namespaces for name in (*OTHERS, "gone"))
    assert (
        features["runc"].recursive_read_only_mounts
        and features["command"].recursive_read_only_mounts
    )
    assert not features["gone"].recursive_read_only_mounts


@pytest.mark.requirement("6.10", "12.1")
def test_recursively_read_only_mounts_need_a_runtime_with_this_feature(server: Server) -> None:
    """If a runtime lacks the feature, CreateContainer fails with RROUnsupported: inner mounts would
    be writable."""
    folder = server.folder / "rro"
    (folder / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder / "inner"], check=True)
    try:
        mount = api.Mount(
            container_path="/rro", host_path=str(folder), readonly=True, recursive_read_only=True
        )
        pod = run_pod(server, "gone")
        text = message_of(lambda: server.create(pod, server.container_config(mounts=[mount])))
        assert text.startswith("RROUnsupported") and "'gone'" in text and not server.containers()
        container = server.launch(run_pod(server, "runc"), server.container_config(mounts=[mount]))
        assert server.exec(container, "touch", "/rro/inner/x").exit_code == 1
        server.remove_all()
    finally:
        subprocess.run(["umount", folder / "inner"], check=True)


def test_only_our_runtime_has_user_namespaces(server: Server) -> None:
    mapping = [api.IDMapping(host_id=200000, container_id=0, length=65536)]
    options = api.NamespaceOption(
        pid=api.CONTAINER,
        userns_options=api.UserNamespace(mode=api.POD, uids=mapping, gids=mapping),
    )
    context = api.LinuxSandboxSecurityContext(namespace_options=options)
    changes = {"linux": api.LinuxPodSandboxConfig(security_context=context)}
    assert code_of(lambda: run_pod(server, "runc", **changes)) == grpc.StatusCode.UNIMPLEMENTED


def test_only_our_runtime_makes_checkpoints(server: Server, tmp_path: Path) -> None:
    """CheckpointContainer fails for a container of another runtime, and the error names the
    handler."""
    container = server.launch(run_pod(server, "runc"))
    request = api.CheckpointContainerRequest(
        container_id=container, location=str(tmp_path / "a.tar")
    )
    message = message_of(lambda: server.runtime.CheckpointContainer(request, timeout=RPC_TIMEOUT_S))
    assert "belongs to the external runtime of handler 'runc'" in message
    assert not list(tmp_path.iterdir())
    assert server.status(container).state == api.CONTAINER_RUNNING


@pytest.mark.requirement("1.a.12")
def test_an_unknown_handler_is_refused(server: Server) -> None:
    assert code_of(lambda: run_pod(server, "kata")) == grpc.StatusCode.INVALID_ARGUMENT
    assert "runc" in message_of(lambda: run_pod(server, "kata"))
    assert not server.pods()


def test_images_are_the_same_for_all_handlers(server: Server) -> None:
    """Lists of images and of containers name no handler, whichever handler a container has."""
    with pytest.raises(grpc.RpcError, match="unknown runtime handler 'kata'") as refused:
        server.image.PullImage(
            api.PullImageRequest(image=api.ImageSpec(image=IMAGE, runtime_handler="kata"))
        )
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    spec = api.ImageSpec(image=IMAGE, runtime_handler="runc", annotations={"io.example/a": "1"})
    (image,) = server.image.ListImages(api.ListImagesRequest()).images
    assert server.image.ImageStatus(api.ImageStatusRequest(image=spec)).image.id == image.id
    container = server.create(run_pod(server, "runc"), server.container_config(image=spec))
    (listed,) = server.runtime.ListContainers(api.ListContainersRequest()).containers
    # With the gate RuntimeClassInImageCriApi kubelet keeps an image if a container with the same
    # handler uses it.
    assert listed.image.runtime_handler == image.spec.runtime_handler == ""
    assert listed.image_id == image.id and not image.spec.annotations
    assert server.status(container).image.runtime_handler == "runc", (
        "the status has the requested handler"
    )


def test_a_handler_can_have_other_settings_for_our_runtime(server: Server) -> None:
    plain, writable = (server.launch(run_pod(server, handler)) for handler in ("", "writable"))
    attempt = ("sh", "-c", "mkdir /sys/fs/cgroup/below /sys/fs/cgroup/unified/below")
    unified = "/sys/fs/cgroup"
    assert server.exec(plain, *attempt).exit_code != 0
    assert "rw" in options_of(server, writable, unified) and "ro" in options_of(
        server, plain, unified
    )
    assert server.exec(writable, "mkdir", f"{unified}/below").exit_code == 0
    assert server.exec(writable, "rmdir", f"{unified}/below").exit_code == 0
    assert capabilities_of(server, writable) == 1 << 0  # CAP_CHOWN
    assert capabilities_of(server, plain) != 1 << 0


def options_of(server: Server, container: str, place: str) -> list[str]:
    lines = [line.split() for line in server.output(container, "cat", "/proc/mounts").splitlines()]
    return next(line[3].split(",") for line in lines if line[1] == place)


def capabilities_of(server: Server, container: str) -> int:
    lines = server.output(container, "cat", "/proc/self/status").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapBnd:")), 16)


def test_a_handler_can_keep_host_devices_from_privileged_containers(server: Server) -> None:
    context = api.LinuxSandboxSecurityContext(privileged=True)
    sandbox = {"linux": api.LinuxPodSandboxConfig(security_context=context)}
    config = server.container_config()
    config.linux.security_context.privileged = True
    with_devices, without = (
        server.launch(run_pod(server, handler, **sandbox), config) for handler in ("", "bare")
    )
    assert server.exec(with_devices, "test", "-c", "/dev/kmsg").exit_code == 0
    assert server.exec(without, "test", "-c", "/dev/kmsg").exit_code == 1


def test_containers_of_a_removed_handler_can_still_be_stopped(own_server: Server) -> None:
    server = own_server
    pod = run_pod(server, "runc")
    running = server.launch(pod, server.container_config(TRAP))
    server.wait_logged(running, "ready")
    path = server.folder / "config.toml"
    path.write_text(path.read_text().replace("[runtimes.runc]", "[runtimes.other]"))
    server.restart()
    late = server.container_config(metadata=api.ContainerMetadata(name="late"))
    assert code_of(lambda: server.create(pod, late)) == grpc.StatusCode.FAILED_PRECONDITION
    assert server.output(running, "echo", "still") == "still\n"
    server.stop_container(running, timeout_s=30)
    assert server.wait_exit(running).exit_code == 7
    server.remove_pod(pod)


def test_an_interrupted_start_of_another_runtime_is_deleted(tmp_path: Path) -> None:
    """If the server is killed during the start, the shim runs the runtime's `delete`."""
    begun, script = tmp_path / "begun", tmp_path / "runtime"
    script.write_text(
        f"""#!/bin/sh
case " $* " in *" start "*) touch {begun}; sleep 3600;; esac
exec {toolchain.runc()} "$@"
"""
    )
    script.chmod(0o755)
    with (
        Server(settings={"runtimes.slow": {"binary": str(script)}}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.load_image()
        pod = run_pod(server, "slow")
        container = server.create(pod)
        start = pool.submit(server.start_container, container)
        assert wait_until(begun.exists, 30)
        assert any(runtime_folder(server, container).iterdir())
        server.restart(Server.kill)
        assert isinstance(start.exception(), grpc.RpcError)
        assert server.wait_exit(container).reason == "StartError"
        assert wait_until(lambda: not any(runtime_folder(server, container).iterdir()), 30)
        server.remove_pod(pod)
