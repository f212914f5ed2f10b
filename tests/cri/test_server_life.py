"""The life of pods and containers over the real socket: run, create, start, exec, stop, remove, and what each shows."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, RPC_TIMEOUT_S, Server, code_of, message_of
from tests.support.processes import wait_until

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}(Z|[+-]\d\d:\d\d) (stdout|stderr) [FP] .*")


def test_a_pod_and_its_container(server: Server) -> None:
    pod = server.run_pod()
    sandbox = server.pod_status(pod)
    assert sandbox.state == api.SANDBOX_READY and sandbox.network.ip.startswith("10.88.")
    container = server.create(pod)
    created = server.status(container)
    assert created.state == api.CONTAINER_CREATED and created.started_at == 0
    server.start_container(container)
    running = server.status(container)
    assert running.state == api.CONTAINER_RUNNING and running.started_at >= created.created_at
    assert server.output(container, "echo", "hello") == "hello\n"
    server.stop_container(container)
    exited = server.status(container)
    assert (exited.state, exited.exit_code, exited.reason) == (api.CONTAINER_EXITED, 137, "Error")
    assert exited.finished_at >= running.started_at and exited.message == ""
    server.remove_container(container)
    assert code_of(lambda: server.status(container)) == grpc.StatusCode.NOT_FOUND
    server.stop_pod(pod)
    assert server.pod_status(pod).state == api.SANDBOX_NOTREADY
    server.remove_pod(pod)
    assert code_of(lambda: server.pod_status(pod)) == grpc.StatusCode.NOT_FOUND
    assert not server.pods()


def test_status_carries_what_kubelet_checks(server: Server) -> None:
    pod = server.run_pod(server.pod_config(labels={"a": "1", "empty": ""}, annotations={"b": "2"}))
    container = server.launch(pod, server.container_config(labels={"l": "x"}, annotations={"n": ""}))
    sandbox, status = server.pod_status(pod), server.status(container)
    assert dict(sandbox.labels) == {"a": "1", "empty": ""} and dict(sandbox.annotations) == {"b": "2"}
    assert sandbox.linux.namespaces.options.pid == api.CONTAINER
    assert dict(status.labels) == {"l": "x"} and dict(status.annotations) == {"n": ""}
    assert status.image.image and status.image_ref and status.created_at
    (listed,) = server.containers()
    image = server.image.ImageStatus(api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))).image
    assert listed.image_id == status.image_id == image.id
    assert status.log_path == str(server.logs / "pod1" / "c.log") or status.log_path.endswith("/c.log")
    assert status.stop_signal == api.SIGNAL_SIGTERM
    assert list(status.user.linux.supplemental_groups) == [0]


def test_output_goes_to_the_log_in_cri_form(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod, server.container_config(["sh", "-c", "echo to stdout; echo to stderr >&2; printf tail"])
    )
    status = server.wait_exit(container)
    assert (status.exit_code, status.reason) == (0, "Completed")
    lines = Path(status.log_path).read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert sorted(line.split(" ", 1)[1] for line in lines) == [
        "stderr F to stderr",
        "stdout F to stdout",
        "stdout P tail",
    ]
    server.remove_container(container)
    assert Path(status.log_path).exists()


def test_exit_codes(server: Server) -> None:
    pod = server.run_pod()
    for name, script, code, reason in (
        ("zero", "exit 0", 0, "Completed"),
        ("seven", "exit 7", 7, "Error"),
        ("signal", "kill -9 $$; sleep 5", 137, "Error"),
    ):
        config = server.container_config(["sh", "-c", script], metadata=api.ContainerMetadata(name=name))
        config.linux.security_context.namespace_options.pid = api.NODE
        status = server.wait_exit(server.launch(pod, config))
        assert (status.exit_code, status.reason) == (code, reason), name


def test_a_start_that_fails_is_an_exit(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod, server.container_config(["/no/such/program"]))
    assert "/no/such/program" in message_of(lambda: server.start_container(container))
    status = server.status(container)
    assert (status.state, status.exit_code, status.reason) == (api.CONTAINER_EXITED, 128, "StartError")
    assert status.message and status.finished_at
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION


def test_exec_sync(server: Server) -> None:
    container = server.launch(server.run_pod())
    answer = server.exec(container, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (answer.stdout, answer.stderr, answer.exit_code) == (b"out\n", b"err\n", 3)
    assert server.exec(container, "sh", "-c", "kill -TERM $$").exit_code == 143
    started = time.monotonic()
    assert code_of(lambda: server.exec(container, "sh", "-c", "sleep 77 & sleep 78", timeout_s=1)) == (
        grpc.StatusCode.DEADLINE_EXCEEDED
    )
    assert 0.9 < time.monotonic() - started < 30
    assert wait_until(lambda: "sleep 7" not in server.output(container, "ps"), 60)
    answer = server.exec(container, "sh", "-c", "sleep 300 & echo done")
    assert answer.stdout == b"done\n" and answer.exit_code == 0
    big = server.exec(container, "sh", "-c", "dd if=/dev/zero bs=1M count=40 2>/dev/null; echo end >&2")
    assert big.exit_code == 0 and 8 << 20 < len(big.stdout) + len(big.stderr) < 16 << 20


def test_exec_of_a_missing_program_says_so(server: Server) -> None:
    container = server.launch(server.run_pod())
    try:
        answer = server.exec(container, "/no/such")
    except grpc.RpcError as error:
        assert "/no/such" in error.details()  # type: ignore[attr-defined]
    else:
        assert answer.exit_code in (126, 127)


def test_exec_needs_a_running_container(server: Server) -> None:
    container = server.create(server.run_pod())
    assert code_of(lambda: server.exec(container, "true")) == grpc.StatusCode.FAILED_PRECONDITION
    assert code_of(lambda: server.exec("f" * 64, "true")) == grpc.StatusCode.NOT_FOUND


def test_stop_honours_the_signal_and_the_grace_period(server: Server) -> None:
    pod = server.run_pod()
    polite = server.launch(
        pod,
        server.container_config(["sh", "-c", "trap 'exit 5' TERM; echo set; while :; do sleep 0.05; done"]),
    )
    server.wait_logged(polite, "set")
    server.stop_container(polite, 10)
    assert server.status(polite).exit_code == 5
    config = server.container_config(
        ["sh", "-c", "trap '' TERM; echo set; while :; do sleep 0.05; done"],
        metadata=api.ContainerMetadata(name="deaf"),
        log_path="deaf.log",
    )
    deaf = server.launch(pod, config)
    server.wait_logged(deaf, "set")
    started = time.monotonic()
    server.stop_container(deaf, 1)
    assert 0.9 < time.monotonic() - started < 30 and server.status(deaf).exit_code == 137
    for container in (polite, deaf, "0" * 64):
        server.stop_container(container, 1)


def test_a_shorter_stop_wins_over_a_longer_one(server: Server) -> None:
    script = "trap 'echo asked' TERM; echo set; while :; do sleep 0.05; done"
    container = server.launch(server.run_pod(), server.container_config(["sh", "-c", script]))
    server.wait_logged(container, "set")
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.stop_container, container, 60)
        server.wait_logged(container, "asked")
        started = time.monotonic()
        server.stop_container(container, 0)
        long.result(30)
    assert time.monotonic() - started < 30


def test_removal_kills_and_is_idempotent(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    with ThreadPoolExecutor() as pool:
        list(pool.map(server.remove_container, [container] * 5))
    server.remove_container(container)
    server.launch(pod, server.container_config(metadata=api.ContainerMetadata(name="d", attempt=1)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(server.stop_pod, [pod] * 5))
        list(pool.map(server.remove_pod, [pod] * 5))
    server.stop_pod(pod), server.remove_pod(pod)
    assert not server.containers() and not server.pods()
    assert not list((server.state / "containers").iterdir())
    assert not list((server.state / "sandboxes").iterdir())
    assert not list((server.root / "containers").iterdir())


def test_identical_requests_give_one_pod(server: Server) -> None:
    config = server.pod_config("same")
    with ThreadPoolExecutor(50) as pool:
        assert len(set(pool.map(lambda _: server.run_pod(config), range(50)))) == 1
    pod = server.run_pod(config)
    assert len(server.pods()) == 1
    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(lambda _: server.create(pod), range(20)))) == 1
    other = server.pod_config("same", labels={"x": "y"})
    assert code_of(lambda: server.run_pod(other)) == grpc.StatusCode.ALREADY_EXISTS


def test_lists_and_filters(server: Server) -> None:
    first = server.run_pod(server.pod_config(labels={"app": "a", "tier": "x"}))
    second = server.run_pod(server.pod_config(labels={"app": "b", "tier": "x"}))
    running = server.launch(first, server.container_config(labels={"k": "v"}))
    created = server.create(second)
    ready = api.PodSandboxStateValue(state=api.SANDBOX_READY)
    assert {p.id for p in server.pods(state=ready)} == {first, second}
    assert {p.id for p in server.pods(label_selector={"app": "a", "tier": "x"})} == {first}
    assert not server.pods(label_selector={"app": "a", "tier": "y"})
    assert {p.id for p in server.pods(id=second[:13])} == {second}
    assert {c.id for c in server.containers(pod_sandbox_id=first)} == {running}
    wanted = api.ContainerStateValue(state=api.CONTAINER_CREATED)
    assert {c.id for c in server.containers(state=wanted)} == {created}
    assert not server.containers(state=wanted, pod_sandbox_id=first)
    assert {c.id for c in server.containers(label_selector={"k": "v"})} == {running}
    server.stop_pod(first)
    assert {p.id for p in server.pods(state=ready)} == {second}
    assert server.status(running).state == api.CONTAINER_EXITED
    streamed = [
        c.id
        for part in server.runtime.StreamContainers(api.StreamContainersRequest(), timeout=30)
        for c in part.containers
    ]
    assert sorted(streamed) == sorted([running, created])


def test_nothing_starts_in_a_stopped_pod(server: Server) -> None:
    pod = server.run_pod()
    container = server.create(pod)
    server.stop_pod(pod)
    assert code_of(lambda: server.start_container(container)) == grpc.StatusCode.FAILED_PRECONDITION
    config = server.container_config(metadata=api.ContainerMetadata(name="late"))
    assert code_of(lambda: server.create(pod, config)) == grpc.StatusCode.FAILED_PRECONDITION


def test_the_log_is_reopened(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(
        pod, server.container_config(["sh", "-c", "while :; do echo tick; sleep 0.05; done"])
    )
    path = Path(server.status(container).log_path)
    server.wait_logged(container, "tick")
    moved = path.with_suffix(".old")
    path.rename(moved)
    server.runtime.ReopenContainerLog(api.ReopenContainerLogRequest(container_id=container), timeout=30)
    assert path.exists()
    size = moved.stat().st_size
    server.wait_logged(container, "tick")
    assert size > 0 and moved.stat().st_size == size and path.stat().st_size > 0
    server.stop_container(container)
    path.unlink()
    request = api.ReopenContainerLogRequest(container_id=container)
    code = code_of(lambda: server.runtime.ReopenContainerLog(request, timeout=30))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and not path.exists()


def test_stats(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(["sh", "-c", "while :; do :; done"]))
    idle = server.create(pod, server.container_config(metadata=api.ContainerMetadata(name="idle")))
    request = api.ContainerStatsRequest(container_id=container)

    def busy() -> bool:
        found = server.runtime.ContainerStats(request, timeout=30).stats.cpu
        return bool(found.timestamp and found.usage_core_nano_seconds.value > 50_000_000)

    assert wait_until(busy, 60)
    stats = server.runtime.ContainerStats(request, timeout=30).stats
    assert stats.attributes.id == container and stats.attributes.metadata.name == "c"
    assert stats.memory.timestamp and stats.memory.working_set_bytes.value > 0
    assert stats.writable_layer.fs_id.mountpoint and stats.writable_layer.HasField("used_bytes")
    listed = server.runtime.ListContainerStats(api.ListContainerStatsRequest(), timeout=30).stats
    assert [s.attributes.id for s in listed] == [container] and idle
    pods = server.runtime.ListPodSandboxStats(api.ListPodSandboxStatsRequest(), timeout=30).stats
    (only,) = pods
    assert only.attributes.id == pod and only.linux.network.default_interface.name == "eth0"
    assert only.linux.process.process_count.value >= 2
    assert only.linux.cpu.usage_core_nano_seconds.value > 50_000_000


def test_metrics_are_those_that_were_announced(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod, server.container_config(["sh", "-c", "while :; do :; done"]))
    request = api.ListMetricDescriptorsRequest()
    announced = {
        d.name: list(d.label_keys) for d in server.runtime.ListMetricDescriptors(request).descriptors
    }
    assert len(announced) == 56
    deadline = time.monotonic() + 60
    while True:
        (found,) = server.runtime.ListPodSandboxMetrics(api.ListPodSandboxMetricsRequest()).pod_metrics
        (of_container,) = found.container_metrics
        values = {m.name: m.value.value for m in of_container.metrics}
        if values["container_cpu_usage_seconds_total"] >= 1:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found.pod_sandbox_id == pod and of_container.container_id == container
    everything = [*found.metrics, *of_container.metrics]
    assert all(len(m.label_values) == len(announced[m.name]) and m.HasField("value") for m in everything)
    optional = {
        n
        for n in announced
        if n.startswith(
            tuple(f"container_{w}" for w in ("fs_reads", "fs_writes", "blkio", "hugetlb", "pressure"))
        )
    }
    assert {m.name for m in everything} >= announced.keys() - optional
    assert values["container_processes"] == 1
    assert (
        values["container_start_time_seconds"] > 1_600_000_000 and values["container_file_descriptors"] >= 3
    )
    assert values["container_ulimits_soft"] == 1024
    own_rate = api.ContainerStatsRequest(container_id=container)
    first = server.runtime.ContainerStats(own_rate).stats.cpu
    assert not first.HasField("usage_nano_cores"), "a rate of one sample"
    assert wait_until(
        lambda: server.runtime.ContainerStats(own_rate).stats.cpu.usage_nano_cores.value > 10_000_000, 30
    )
    (streamed,) = server.runtime.StreamPodSandboxMetrics(api.StreamPodSandboxMetricsRequest())
    assert streamed.pod_sandbox_metrics[0].pod_sandbox_id == pod


def test_events_follow_a_life(server: Server) -> None:
    stream = server.runtime.GetContainerEvents(api.GetEventsRequest(), timeout=RPC_TIMEOUT_S)
    seen: list[tuple[str, int]] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: seen.extend((e.container_id, e.container_event_type) for e in stream))
        assert wait_until(lambda: _herald(server) in (about for about, _ in seen), 60)
        pod = server.run_pod()
        container = server.launch(pod, server.container_config(["true"]))
        server.wait_exit(container)
        server.remove_container(container)
        server.stop_pod(pod)
        server.remove_pod(pod)
        assert wait_until(lambda: (pod, api.CONTAINER_DELETED_EVENT) in seen, 60)
        stream.cancel()
        assert isinstance(reading.exception(30), grpc.RpcError)
    of_container = [kind for about, kind in seen if about == container]
    assert of_container == [0, 1, 2, 3]
    of_pod = [kind for about, kind in seen if about == pod]
    assert of_pod == [0, 1, 2, 3], (
        "each once, the stop too, which the exit of its pause process tells of as well"
    )


def test_a_pod_on_the_hosts_network_has_no_interfaces_of_its_own(server: Server) -> None:
    """The node's counters belong to the node: added to a pod's they would be counted twice."""
    pod, own = server.run_pod(host_network=True), server.run_pod()
    request = api.ListPodSandboxStatsRequest()
    found = {s.attributes.id: s.linux for s in server.runtime.ListPodSandboxStats(request, timeout=30).stats}
    assert not found[pod].HasField("network") and found[pod].process.process_count.value == 1
    assert [i.name for i in found[own].network.interfaces] == ["eth0"]


def _herald(server: Server) -> str:
    """The id of a pod that was there for a moment: whoever hears of it hears of those that come."""
    pod = server.run_pod()
    server.remove_pod(pod)
    return pod


def test_runtime_and_image_calls(server: Server) -> None:
    version = server.runtime.Version(api.VersionRequest())
    assert (version.version, version.runtime_api_version) == ("0.1.0", "v1")
    status = server.runtime.Status(api.StatusRequest(verbose=True))
    assert {c.type: c.status for c in status.status.conditions} == {
        "RuntimeReady": True,
        "NetworkReady": True,
    }
    assert "" in {h.name for h in status.runtime_handlers} and status.info["config"]
    driver = server.runtime.RuntimeConfig(api.RuntimeConfigRequest()).linux.cgroup_driver
    assert driver == api.CGROUPFS
    server.runtime.UpdateRuntimeConfig(api.UpdateRuntimeConfigRequest())
    wrong = api.UpdateRuntimeConfigRequest()
    wrong.runtime_config.network_config.pod_cidr = "10.1.0.0/16,10.2.0.0/99"
    assert code_of(lambda: server.runtime.UpdateRuntimeConfig(wrong)) == grpc.StatusCode.INVALID_ARGUMENT
    info = server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems[0]
    assert info.timestamp and info.HasField("used_bytes") and Path(info.fs_id.mountpoint).is_dir()


def test_a_pod_on_the_hosts_network_has_no_address(server: Server) -> None:
    pod = server.run_pod(host_network=True)
    assert server.pod_status(pod).network.ip == ""
    container = server.launch(pod)
    assert server.output(container, "ip", "link", "show", "lo")


def test_id_prefixes_are_understood(server: Server) -> None:
    pod = server.run_pod()
    container = server.launch(pod)
    assert server.status(container[:12]).id == container
    assert server.pod_status(pod[:12]).id == pod
    assert code_of(lambda: server.status("")) == grpc.StatusCode.NOT_FOUND


def test_the_writable_layers_are_what_containers_take(server: Server) -> None:
    """Apart from the images, and without anybody waiting for a walk: each answer has what the walks before it found."""

    def containers() -> api.FilesystemUsage:
        return server.image.ImageFsInfo(api.ImageFsInfoRequest()).container_filesystems[0]

    assert containers().HasField("used_bytes") and containers().used_bytes.value == 0
    container = server.launch(server.run_pod())
    server.output(container, "dd", "if=/dev/zero", "of=/file", "bs=1M", "count=3")
    images = server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems[0]
    stats = api.ContainerStatsRequest(container_id=container)

    def grown() -> bool:
        server.runtime.ContainerStats(stats)  # kubelet asks all the time, and a layer rests between two walks
        return containers().used_bytes.value >= 3 << 20

    assert wait_until(grown, 60)
    assert containers().inodes_used.value > 0 and containers().fs_id.mountpoint == images.fs_id.mountpoint
    assert (
        server.image.ImageFsInfo(api.ImageFsInfoRequest()).image_filesystems[0].used_bytes
        == images.used_bytes
    )
    server.remove_container(container)
    assert containers().used_bytes.value == 0
