"""Tests containerd with our runtime behind its runc shim: by `ctr`, and over CRI with systemd's
cgroups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from cri_server.images.archives import build
from tests.support.processes import Program, wait_until
from tests.vm.oci import commands
from tests.vm.oci.commands import User

pytestmark = pytest.mark.slow
MIB = 1 << 20
PROGRAMS = Path("/opt/containerd")  # the test on the host puts it there
SOCKET = "/run/ctd/c.sock"
STATE = "/run/ctd/state"
IMAGE = "localhost/box:1"
PAUSE = "localhost/pause:1"
CONFIGURATION = f"""version = 3
root = "/var/lib/ctd"
state = "{STATE}"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{SOCKET}"
[plugins.'io.containerd.cri.v1.runtime']
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "pyrunc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.pyrunc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.pyrunc.options]
        BinaryName = "{commands.PYRUNC}"
        SystemdCgroup = true
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.plain]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.plain.options]
        BinaryName = "{commands.PYRUNC}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE}"
"""


class Ctr:
    """Runs `ctr` in one of containerd's namespaces."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __call__(
        self, *words: str | Path, check: bool = True, terminal: bool = False
    ) -> commands.Done:
        command = [PROGRAMS / "ctr", "-a", SOCKET, "-n", self._namespace, *words]
        return User().run(*command, check=check, terminal=terminal, timeout_s=180)

    def run(
        self, name: str, *words: str, options: tuple[str, ...] = (), check: bool = True
    ) -> commands.Done:
        """Run `ctr run` with our runtime."""
        return self(
            "run", "--runc-binary", commands.PYRUNC, *options, IMAGE, name, *words, check=check
        )

    def pid(self, name: str) -> int:
        lines = [line.split() for line in self("task", "ls").stdout.splitlines()]
        return next(int(pid) for task, pid, *_ in lines if task == name)


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Provide a running containerd that has a busybox and a pause image."""
    folder = tmp_path_factory.mktemp("containerd")
    (folder / "config.toml").write_text(CONFIGURATION)
    pause = (Path("/root/project/pyrunc/native/pause")).read_bytes()
    images = {
        IMAGE: build.image(build.busybox().layers, {"Env": ["PATH=/bin"], "Cmd": ["sh"]}),
        PAUSE: build.image(
            [build.layer({"pause": build.LayerFile(pause, mode=0o755)})], {"Entrypoint": ["/pause"]}
        ),
    }
    (folder / "images.tar").write_bytes(build.docker_archive(images))
    program = Program("containerd", folder)
    program.start(
        [str(PROGRAMS / "containerd"), "-c", str(folder / "config.toml")],
        environment={"PATH": f"{PROGRAMS}:{commands.PATH}"},
    )
    try:
        assert wait_until(lambda: Ctr("default")("version", check=False).returncode == 0, 90, 1), (
            program.tail()
        )
        for namespace in ("default", "k8s.io"):
            Ctr(namespace)("images", "import", folder / "images.tar")
        yield program
    finally:
        program.stop()


@pytest.fixture
def ctr(containerd: Program) -> Iterator[Ctr]:
    command = Ctr("default")
    yield command
    for line in command("task", "ls", "-q").stdout.split():
        command("task", "rm", "-f", line, check=False)
    for line in command("container", "ls", "-q").stdout.split():
        command("container", "rm", line, check=False)
    assert not list(Path("/run/containerd/runc/default").glob("*"))


def test_containerd_gets_exit_code_and_output(ctr: Ctr) -> None:
    done = ctr.run(
        "short",
        "sh",
        "-c",
        "echo said; echo wrong >&2; cat /proc/self/cgroup; exit 3",
        options=("--rm",),
        check=False,
    )
    assert done.returncode == 3 and done.stdout.split() == ["said", "0::/default/short"]
    assert "wrong" in done.stderr
    missing = ctr.run("missing", "no-such-program", options=("--rm",), check=False)
    assert missing.returncode != 0 and "executable file not found in $PATH" in missing.stderr


def test_a_task_of_containerd_runs_from_start_to_end(ctr: Ctr) -> None:
    limit = ("--memory-limit", str(64 * MIB))
    ctr.run("long", "sleep", "1000", options=("-d", "--cgroup", "/ctd-test/long", *limit))
    group = commands.CGROUPS / Path(
        f"/proc/{ctr.pid('long')}/cgroup"
    ).read_text().strip().removeprefix("0::/")
    assert group == commands.CGROUPS / "ctd-test/long"
    assert (group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (
        ctr("task", "exec", "--exec-id", "one", "long", "echo", "hello").stdout.strip() == "hello"
    )
    assert (
        ctr(
            "task", "exec", "--exec-id", "two", "long", "sh", "-c", "exit 9", check=False
        ).returncode
        == 9
    )
    output = ctr("task", "exec", "-t", "--exec-id", "tty", "long", "tty", terminal=True).stdout
    assert "/dev/pts/" in output
    ctr("task", "pause", "long")
    assert (
        "PAUSED" in ctr("task", "ls").stdout and "frozen 1" in (group / "cgroup.events").read_text()
    )
    ctr("task", "resume", "long")
    assert "memory" in ctr("task", "metrics", "long").stdout
    ctr("task", "kill", "-s", "KILL", "long")
    assert wait_until(lambda: "STOPPED" in ctr("task", "ls").stdout, 30, 1)
    assert ctr("task", "rm", "long", check=False).returncode in (0, 137)
    ctr("container", "rm", "long")
    assert not group.exists()


def test_containerd_checkpoints_a_task(ctr: Ctr) -> None:
    ctr.run("dumped", "sleep", "1000", options=("-d",))
    # The shim calls our runtime, which calls CRIU.
    ctr("task", "checkpoint", "--exit", "dumped")
    assert wait_until(lambda: "RUNNING" not in ctr("task", "ls").stdout, 30, 1)


class Cri:
    """Makes the calls of a kubelet."""

    def __init__(self, channel: grpc.Channel, folder: Path) -> None:
        self.runtime: Any = api_pb2_grpc.RuntimeServiceStub(channel)
        self.folder = folder

    def pod(
        self, name: str, handler: str = "", parent: str = "ctdpods.slice"
    ) -> tuple[str, api.PodSandboxConfig]:
        """Run a pod on the host's network; return its id and configuration. The handler `plain`
        uses cgroupfs."""
        config = api.PodSandboxConfig(
            metadata=api.PodSandboxMetadata(name=name, uid=f"{name}-uid", namespace="default"),
            log_directory=str(self.folder / name),
            linux=api.LinuxPodSandboxConfig(cgroup_parent=parent),
        )
        config.linux.security_context.namespace_options.network = api.NODE
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        request = api.RunPodSandboxRequest(config=config, runtime_handler=handler)
        answer = self.runtime.RunPodSandbox(request, timeout=120)
        return str(answer.pod_sandbox_id), config

    def container(
        self, pod: str, pod_config: api.PodSandboxConfig, *command: str, **linux: Any
    ) -> str:
        """Start a container of the pod; return its id."""
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name="c"),
            image=api.ImageSpec(image=IMAGE),
            command=command,
            log_path="c.log",
            linux=api.LinuxContainerConfig(**linux),
        )
        config.linux.security_context.namespace_options.network = api.NODE
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        request = api.CreateContainerRequest(
            pod_sandbox_id=pod, config=config, sandbox_config=pod_config
        )
        container = str(self.runtime.CreateContainer(request, timeout=120).container_id)
        self.runtime.StartContainer(api.StartContainerRequest(container_id=container), timeout=120)
        return container

    def status(self, container: str) -> api.ContainerStatus:
        return self.runtime.ContainerStatus(
            api.ContainerStatusRequest(container_id=container), timeout=60
        ).status

    def exec(self, container: str, *command: str) -> api.ExecSyncResponse:
        request = api.ExecSyncRequest(container_id=container, cmd=command, timeout=60)
        return self.runtime.ExecSync(request, timeout=90)


@pytest.fixture
def cri(containerd: Program, tmp_path: Path) -> Iterator[Cri]:
    with grpc.insecure_channel(f"unix://{SOCKET}") as channel:
        client = Cri(channel, tmp_path)
        yield client
        for pod in client.runtime.ListPodSandbox(api.ListPodSandboxRequest(), timeout=60).items:
            client.runtime.StopPodSandbox(
                api.StopPodSandboxRequest(pod_sandbox_id=pod.id), timeout=120
            )
            client.runtime.RemovePodSandbox(
                api.RemovePodSandboxRequest(pod_sandbox_id=pod.id), timeout=120
            )
    assert not list(Path("/run/containerd/runc/k8s.io").glob("*"))
    assert not list((commands.CGROUPS / "ctdpods.slice").glob("cri-containerd-*"))


def test_a_pod_runs_over_cri(cri: Cri) -> None:
    pod, config = cri.pod("one")
    resources = api.LinuxContainerResources(
        memory_limit_in_bytes=64 * MIB, cpu_quota=50_000, cpu_period=100_000, cpu_shares=512
    )
    container = cri.container(
        pod,
        config,
        "sh",
        "-c",
        "echo started; trap 'exit 5' TERM; while :; do sleep 0.2; done",
        resources=resources,
    )
    group = commands.CGROUPS / "ctdpods.slice" / f"cri-containerd-{container}.scope"
    assert (group / "memory.max").read_text().strip() == str(64 * MIB)
    assert (group / "cpu.max").read_text().strip() == "50000 100000"
    assert (group / "cpu.weight").read_text().strip() == "59"
    assert cri.status(container).state == api.CONTAINER_RUNNING
    answer = cri.exec(container, "sh", "-c", "echo out; echo err >&2; exit 4")
    assert (answer.exit_code, answer.stdout, answer.stderr) == (4, b"out\n", b"err\n")
    update = api.LinuxContainerResources(memory_limit_in_bytes=96 * MIB)
    cri.runtime.UpdateContainerResources(
        api.UpdateContainerResourcesRequest(container_id=container, linux=update), timeout=60
    )
    assert (group / "memory.max").read_text().strip() == str(96 * MIB)
    stats = cri.runtime.ContainerStats(
        api.ContainerStatsRequest(container_id=container), timeout=60
    ).stats
    assert stats.memory.working_set_bytes.value > 0 and stats.cpu.usage_core_nano_seconds.value > 0
    cri.runtime.StopContainer(
        api.StopContainerRequest(container_id=container, timeout=30), timeout=120
    )
    assert cri.status(container).exit_code == 5
    assert " stdout F started" in (cri.folder / "one/c.log").read_text()
    assert not group.exists()


def test_an_oom_kill_is_reported_over_cri(cri: Cri) -> None:
    # cgroupfs, because systemd removes a scope with its last process, and containerd then has no
    # file to read (see its handleContainerExit).
    pod, config = cri.pod("hungry", "plain", "/ctdplain")
    resources = api.LinuxContainerResources(memory_limit_in_bytes=16 * MIB)
    container = cri.container(
        pod, config, "sh", "-c", "sleep 1; exec tail /dev/zero", resources=resources
    )
    assert wait_until(lambda: cri.status(container).state == api.CONTAINER_EXITED, 90, 1)
    status = cri.status(container)
    assert (status.exit_code, status.reason) == (137, "OOMKilled")


def test_containers_of_a_pod_end_separately(cri: Cri) -> None:
    """After a container of the pod has ended, another one lives in the same shim."""
    pod, config = cri.pod("two")
    first = cri.container(pod, config, "sleep", "1000")
    cri.runtime.StopContainer(api.StopContainerRequest(container_id=first, timeout=0), timeout=60)
    cri.runtime.RemoveContainer(api.RemoveContainerRequest(container_id=first), timeout=60)
    second = cri.container(pod, config, "sleep", "1000")
    time.sleep(1)
    assert cri.status(second).state == api.CONTAINER_RUNNING
