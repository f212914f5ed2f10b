"""Times the calls that kubelet makes in a pod's life, one by one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc

from cri_server.api import api_pb2 as api
from tests.bench import memory
from tests.bench.servers import IMAGE, Server
from tests.support import cri

MASKED = (
    "/proc/asound", "/proc/acpi", "/proc/interrupts", "/proc/kcore", "/proc/keys",
    "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
    "/sys/devices/virtual/powercap",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
SERVICE = (
    "SERVICE_HOST",
    "SERVICE_PORT",
    "SERVICE_PORT_HTTPS",
    "PORT",
    "PORT_443_TCP",
    "PORT_443_TCP_PROTO",
    "PORT_443_TCP_PORT",
    "PORT_443_TCP_ADDR",
)
QUIET_S = 40.0
LINES, LINE_BYTES = 400_000, 100
RELISTS, MEASUREMENTS = 20, 5  # per round


def busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine, without idling and waiting
    (proc(5), /proc/stat)."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def version(client: cri.Client, runtime: str) -> str:
    """Return the name and version of a server and, unless `runtime` is empty, of its OCI
    runtime."""
    answer = client.runtime.Version(api.VersionRequest(), timeout=10)
    own = f"{answer.runtime_name} {answer.runtime_version.removesuffix('+unknown')}"
    return f"{own} + {runtime}" if runtime else own


class Bench:
    """Makes and times calls to one server.

    `samples`: the durations of each step in milliseconds; `rates`: the values of each rate.
    """

    def __init__(self, server: Server, folder: Path, image: str = IMAGE) -> None:
        self.name = server.name
        self.server = server
        self.image = image
        self.folder = folder
        self.client = cri.connect(server.socket)
        self.version = version(self.client, server.runtime)
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.rates: dict[str, list[float]] = defaultdict(list)
        (folder / "serviceaccount").mkdir(parents=True)
        for file in ("hosts", "termination-log"):
            (folder / file).touch()

    def forget(self) -> None:
        self.samples.clear()
        self.rates.clear()

    def round(self, label: str, pods: int, parallel: int) -> None:
        """Start `pods` pods, `parallel` at once, list, measure and probe them, and remove them."""
        with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
            before_kib = self.private_kib()
            cpu, begin = busy_seconds(), time.perf_counter()
            running = list(pool.map(self.up, [f"{label}-{i}" for i in range(pods)]))
            self.rates["pods up per second"].append(pods / (time.perf_counter() - begin))
            for _ in range(RELISTS):
                self.relist()
            for _ in range(MEASUREMENTS):
                self.measure()
            list(pool.map(self.ask, running))
            self.rates["private memory per pod"].append((self.private_kib() - before_kib) / pods)
            begin = time.perf_counter()
            list(pool.map(self.down, running))
            self.rates["pods down per second"].append(pods / (time.perf_counter() - begin))
            self.rates["CPU of the machine per cycle"].append((busy_seconds() - cpu) * 1e3 / pods)

    def rest(self, label: str, pods: int) -> None:
        """Measure the memory of the server without pods, and then of pods, each after a while
        without work."""
        before_kib = self.idle()
        running = [self.up(f"{label}-{i}") for i in range(pods)]
        for pair in running:
            self.ask(pair)
        time.sleep(QUIET_S)
        self.rates["private memory per quiet pod"].append((self.private_kib() - before_kib) / pods)
        for pair in running:
            self.down(pair)

    def idle(self) -> int:
        """Measure the memory of the server and its helpers after a while without pods; return
        `private_kib`."""
        time.sleep(QUIET_S)
        self.rates["idle server and helpers, PSS"].append(
            memory.pss_kib(self.server.processes()) / 1024
        )
        return self.private_kib()

    def log(self, name: str) -> None:
        """Measure the CPU time for a container that writes lines as fast as the server reads them;
        the container's own time is included."""
        runtime, sandbox, config = self.client.runtime, self._sandbox(name), self._container(name)
        config.command[:] = ["sh", "-c", f"yes {'x' * (LINE_BYTES - 1)} | head -n {LINES}"]
        config.linux.ClearField("resources")
        pod = runtime.RunPodSandbox(
            api.RunPodSandboxRequest(config=sandbox), timeout=120
        ).pod_sandbox_id
        request = api.CreateContainerRequest(
            pod_sandbox_id=pod, config=config, sandbox_config=sandbox
        )
        container = runtime.CreateContainer(request, timeout=120).container_id
        cpu = busy_seconds()
        runtime.StartContainer(api.StartContainerRequest(container_id=container), timeout=120)
        status_request = api.ContainerStatusRequest(container_id=container)
        while (
            status := runtime.ContainerStatus(status_request, timeout=120).status
        ).state != api.CONTAINER_EXITED:
            time.sleep(0.05)
        self.rates["CPU per 100,000 log lines"].append((busy_seconds() - cpu) * 1e8 / LINES)
        self.rates["log lines per second"].append(
            LINES * 1e9 / (status.finished_at - status.started_at)
        )
        self.down((pod, container))
        (self.folder / f"{name}.log").unlink()

    def up(self, name: str) -> tuple[str, str]:
        """Start a pod with a container; return their ids."""
        runtime, begin = self.client.runtime, time.perf_counter()
        sandbox = self._sandbox(name)
        pod = self._timed(
            "RunPodSandbox", runtime.RunPodSandbox, api.RunPodSandboxRequest(config=sandbox)
        ).pod_sandbox_id
        request = api.CreateContainerRequest(
            pod_sandbox_id=pod, config=self._container(name), sandbox_config=sandbox
        )
        container = self._timed("CreateContainer", runtime.CreateContainer, request).container_id
        self._timed(
            "StartContainer",
            runtime.StartContainer,
            api.StartContainerRequest(container_id=container),
        )
        self._sample("pod up", begin)
        return pod, container

    def relist(self) -> None:
        """Make the list calls that kubelet makes every second."""
        runtime = self.client.runtime
        self._timed("ListPodSandbox", runtime.ListPodSandbox, api.ListPodSandboxRequest())
        self._timed("ListContainers", runtime.ListContainers, api.ListContainersRequest())

    def measure(self) -> None:
        """Make the statistics calls that kubelet makes every ten seconds."""
        runtime = self.client.runtime
        self._timed(
            "ListContainerStats", runtime.ListContainerStats, api.ListContainerStatsRequest()
        )
        # containerd answers with an error for a pod without a cgroup, as on a host without cgroups
        # for pods; the call then gives no sample.
        with contextlib.suppress(grpc.RpcError):
            self._timed(
                "ListPodSandboxStats", runtime.ListPodSandboxStats, api.ListPodSandboxStatsRequest()
            )

    def private_kib(self) -> int:
        """Return the private memory of the server's helpers in KiB; its growth is what pods
        cost."""
        return memory.private_kib(self.server.helpers())

    def ask(self, pair: tuple[str, str]) -> None:
        """Call ContainerStatus and ExecSync, as kubelet does for status loops and probes."""
        runtime = self.client.runtime
        self._timed(
            "ContainerStatus",
            runtime.ContainerStatus,
            api.ContainerStatusRequest(container_id=pair[1]),
        )
        request = api.ExecSyncRequest(container_id=pair[1], cmd=["true"], timeout=10)
        reply = self._timed("ExecSync", runtime.ExecSync, request)
        if reply.exit_code:
            raise RuntimeError(
                f"{self.name}: exec of true: exit code {reply.exit_code}: {reply.stderr!r}"
            )

    def down(self, pair: tuple[str, str]) -> None:
        """Stop and remove a pod, in kubelet's order."""
        runtime, begin = self.client.runtime, time.perf_counter()
        pod, container = pair
        self._timed(
            "StopContainer",
            runtime.StopContainer,
            api.StopContainerRequest(container_id=container, timeout=0),
        )
        self._timed(
            "RemoveContainer",
            runtime.RemoveContainer,
            api.RemoveContainerRequest(container_id=container),
        )
        self._timed(
            "StopPodSandbox", runtime.StopPodSandbox, api.StopPodSandboxRequest(pod_sandbox_id=pod)
        )
        self._timed(
            "RemovePodSandbox",
            runtime.RemovePodSandbox,
            api.RemovePodSandboxRequest(pod_sandbox_id=pod),
        )
        self._sample("pod down", begin)

    def _timed(self, step: str, call: Any, request: Any) -> Any:
        begin = time.perf_counter()
        reply = call(request, timeout=120)
        self._sample(step, begin)
        return reply

    def _sample(self, step: str, begin: float) -> None:
        self.samples[step].append((time.perf_counter() - begin) * 1e3)

    def _labels(self, name: str) -> dict[str, str]:
        return {
            "io.kubernetes.pod.name": name,
            "io.kubernetes.pod.namespace": "bench",
            "io.kubernetes.pod.uid": name,
        }

    def _sandbox(self, name: str) -> Any:
        metadata = api.PodSandboxMetadata(name=name, uid=name, namespace="bench")
        config = api.PodSandboxConfig(
            metadata=metadata,
            hostname=name,
            log_directory=str(self.folder),
            labels=self._labels(name),
        )
        config.dns_config.servers.append("10.96.0.10")
        config.dns_config.searches.extend(
            ["bench.svc.cluster.local", "svc.cluster.local", "cluster.local"]
        )
        config.dns_config.options.append("ndots:5")
        config.linux.security_context.namespace_options.pid = api.CONTAINER
        config.linux.security_context.seccomp.profile_type = api.SecurityProfile.RuntimeDefault
        return config

    def _container(self, name: str) -> Any:
        config = api.ContainerConfig(
            metadata=api.ContainerMetadata(name="c"), image=api.ImageSpec(image=self.image),
            command=["sleep", "3600"], log_path=f"{name}.log",
            labels={**self._labels(name), "io.kubernetes.container.name": "c"},
            annotations={
                "io.kubernetes.container.hash": "1a2b3c4d",
                "io.kubernetes.container.restartCount": "0",
                "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
                "io.kubernetes.container.terminationMessagePolicy": "File",
                "io.kubernetes.pod.terminationGracePeriod": "30",
            },
        )  # fmt: skip
        for variable in SERVICE:
            config.envs.add(key=f"KUBERNETES_{variable}", value=b"10.96.0.1")
        token = "/var/run/secrets/kubernetes.io/serviceaccount"
        config.mounts.add(
            container_path=token, host_path=str(self.folder / "serviceaccount"), readonly=True
        )
        config.mounts.add(container_path="/etc/hosts", host_path=str(self.folder / "hosts"))
        config.mounts.add(
            container_path="/dev/termination-log", host_path=str(self.folder / "termination-log")
        )
        resources = config.linux.resources
        resources.cpu_period, resources.cpu_shares, resources.oom_score_adj = 100_000, 2, 1000
        security = config.linux.security_context
        security.namespace_options.pid = api.CONTAINER
        security.seccomp.profile_type = api.SecurityProfile.RuntimeDefault
        security.masked_paths.extend(MASKED)
        security.readonly_paths.extend(READ_ONLY)
        return config
