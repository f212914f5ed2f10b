"""Tests the server's log about a pod's life: a line for each verb that changed something, its
fields, and no secrets."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server, code_of, message_of, server_fixture

SECRET = "s3cret-w0rd"


server = server_fixture("module", settings={"server": {"log_format": "json", "log_limit_per_s": 5}})


class Log:
    """Reads the records that the server has logged since this object was made."""

    def __init__(self, server: Server) -> None:
        self._path, self._at = server.log, server.log.stat().st_size

    def text(self) -> str:
        return self._path.read_bytes()[self._at :].decode()

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the log, without the doctor's results about this machine."""
        records = [json.loads(line) for line in self.text().splitlines()]
        # The doctor's results come some time after the start.
        return [
            record for record in records if not record["logger"].startswith("cri_server.doctor.")
        ]

    def wait(self, message: str) -> dict[str, Any]:
        """Wait for a record with this message; return the first one."""
        deadline = time.monotonic() + 30
        while True:
            for record in self.records():
                if record["message"] == message:
                    return record
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)


def test_each_call_of_a_pods_life_has_one_line(server: Server) -> None:
    log = Log(server)
    pod = server.run_pod(server.pod_config("life"))
    container = server.launch(pod)
    server.exec(container, "true")
    for _ in range(3):
        server.pods(), server.containers(), server.status(container), server.pod_status(pod)
    server.stop_container(container)
    log.wait("container ended")
    server.remove_container(container)
    server.stop_pod(pod)
    server.stop_pod(pod)  # like kubelet
    server.remove_pod(pod)
    server.remove_pod(pod)
    records = log.records()
    assert [r["message"] for r in records if r["message"] != "container ended"] == [
        *("RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer", "RemoveContainer"),
        *("StopPodSandbox", "RemovePodSandbox"),
    ]
    for record in records:
        assert (
            record["pod"] == "default/life"
            and record["pod_id"] == pod
            and record["level"] == "info"
        )
        if "Container" in record["message"]:
            assert record["container"] == "c" and record["container_id"] == container
        if record["message"] != "container ended":
            assert record["outcome"] == "OK" and record["duration_ms"] > 0
    assert records[1]["image"] == IMAGE
    (ended,) = [r for r in records if r["message"] == "container ended"]
    assert (
        ended["exit_code"] == 137
        and ended["container_id"] == container
        and ended["reason"] == "Error"
    )


def test_a_failure_has_a_single_line_with_its_step_and_reason(server: Server) -> None:
    log = Log(server)
    pod = server.run_pod(server.pod_config("wrong"))
    container = server.create(pod, server.container_config(["/no/such/program"]))
    with pytest.raises(grpc.RpcError) as caught:
        server.start_container(container)
    _, _, failed, *_ = log.records()
    assert failed["message"] == "StartContainer failed" and failed["step"] == "execute"
    assert failed["pod"] == "default/wrong" and failed["container_id"] == container
    assert failed["outcome"] == caught.value.code().name  # type: ignore[attr-defined]
    assert failed["explain"] in ("invalid-argument", "not-found")
    assert failed["error"] == caught.value.details()  # type: ignore[attr-defined]
    server.remove_pod(pod)


def test_failed_reads_are_not_logged(server: Server) -> None:
    log = Log(server)
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            server.status("none")
        server.pods()
        server.runtime.Status(api.StatusRequest(verbose=True))
        server.image.ListImages(api.ListImagesRequest())
        server.image.ImageFsInfo(api.ImageFsInfoRequest())
        server.runtime.ListContainerStats(api.ListContainerStatsRequest())
        server.stop_container("none")
    assert log.records() == []


def test_secrets_are_not_logged(server: Server) -> None:
    log = Log(server)
    pod = server.run_pod(server.pod_config("quiet", annotations={"token": SECRET}))
    config = server.container_config(
        ["sh", "-c", f": {SECRET}; exec sleep 3600"],
        envs=[api.KeyValue(key="TOKEN", value=SECRET.encode())],
        annotations={"token": SECRET},
    )
    container = server.launch(pod, config)
    server.exec(container, "echo", SECRET)
    request = api.ExecRequest(container_id=container, cmd=["echo", SECRET], stdout=True)
    server.runtime.Exec(request)
    with contextlib.suppress(grpc.RpcError):
        server.exec(container, f"/no/{SECRET}")
    for auth in ({"username": "u", "password": SECRET}, {"registry_token": SECRET}):
        with pytest.raises(grpc.RpcError):
            image = api.ImageSpec(image="127.0.0.1:1/app:1")
            server.image.PullImage(api.PullImageRequest(image=image, auth=api.AuthConfig(**auth)))
    server.remove_pod(pod)
    messages = [r["message"] for r in log.records()]
    assert (
        "Exec" in messages
        and messages.count("PullImage failed") == 2
        and "ExecSync" not in messages
    )
    assert SECRET not in log.text()


def test_a_client_that_fails_in_a_loop_is_rate_limited(server: Server) -> None:
    log = Log(server)
    bad = api.RunPodSandboxRequest(config=api.PodSandboxConfig())
    for _ in range(300):
        with pytest.raises(grpc.RpcError):
            server.runtime.RunPodSandbox(bad)
    assert 20 <= len(log.records()) < 200
    pod = server.run_pod(server.pod_config("other"))  # a failure of another kind
    assert log.records()[-1]["message"] == "RunPodSandbox"
    server.remove_pod(pod)


def test_the_log_is_text_on_stderr_by_default() -> None:
    with Server(network=False) as server:
        server.load_image()
        pod = server.run_pod(host_network=True)
        (line,) = [line for line in server.tail().splitlines() if "RunPodSandbox" in line]
        assert (
            f" INFO cri_server.rpc.verbs: RunPodSandbox pod=default/pod1 pod_id={pod} duration_ms="
            in line
        )
        assert line.endswith(" outcome=OK")


def test_the_first_start_logs_no_failure() -> None:
    with Server(network=False) as server:
        lines = [line for line in server.tail().splitlines() if "cri_server.doctor." not in line]
    assert any("recovered 0 sandboxes" in line for line in lines)
    assert not [line for line in lines if "failed" in line or "cannot" in line]


def failures(log: Log, verb: str) -> list[dict[str, Any]]:
    return [r for r in log.records() if r["message"] == f"{verb} failed"]


def test_failures_of_the_node_are_warnings(server: Server) -> None:
    """A valid request that the node cannot fulfil (UNIMPLEMENTED) is logged as a warning to the
    node's administrator, an invalid one as information."""
    pod = server.run_pod(server.pod_config("unable"))
    config = server.container_config()
    config.linux.security_context.apparmor.CopyFrom(
        api.SecurityProfile(profile_type=api.SecurityProfile.Localhost, localhost_ref="none")
    )
    log = Log(server)
    with pytest.raises(grpc.RpcError) as refused:
        server.create(pod, config)
    enabled = Path("/sys/kernel/security/apparmor").exists()
    (line,) = failures(log, "CreateContainer")
    assert line["outcome"] == refused.value.code().name  # type: ignore[attr-defined]
    assert (line["level"], line["outcome"]) == (
        ("info", "INVALID_ARGUMENT") if enabled else ("warning", "UNIMPLEMENTED")
    )
    assert "apparmor profile" in line["error"] and line["pod"] == "default/unable"
    server.remove_all()


def test_errors_about_a_missing_controller_name_the_container_and_the_setting() -> None:
    """With `missing_controllers = "error"`, CreateContainer and UpdateContainerResources fail if a
    limit needs a controller that is not on the cgroup v2 tree. Error and log line name the
    container and the setting."""
    with Server(
        settings={"cgroup": {"driver": "cgroupfs", "missing_controllers": "error"}}
    ) as server:
        server.load_image()
        pod = server.run_pod(server.pod_config(linux=api.LinuxPodSandboxConfig()))
        roots = (
            Path("/sys/fs/cgroup/unified/cgroup.controllers"),
            Path("/sys/fs/cgroup/cgroup.controllers"),
        )
        there = next(root for root in roots if root.exists()).read_text().split()
        limits = api.LinuxContainerResources(cpu_shares=2048)
        config = server.container_config(linux=api.LinuxContainerConfig(resources=limits))
        if "cpu" in there:
            server.create(pod, config)
            return
        hint = 'with [cgroup] missing_controllers = "warn" it runs without that limit'
        for verb, call in (
            ("CreateContainer", lambda: server.create(pod, config)),
            ("UpdateContainerResources", lambda: update(server, server.launch(pod), limits)),
        ):
            error = message_of(call)
            assert error.startswith(f"container {config.metadata.name}: cannot set cpu.weight to ")
            assert "the cpu controller is not on the cgroup v2 tree" in error and error.endswith(
                hint
            )
            lines = [
                line for line in server.log.read_text().splitlines() if f"{verb} failed" in line
            ]
            assert (
                len(lines) == 1 and " WARNING " in lines[0] and hint in lines[0].replace('\\"', '"')
            )
        server.remove_all()


def update(server: Server, container: str, limits: api.LinuxContainerResources) -> None:
    request = api.UpdateContainerResourcesRequest(container_id=container, linux=limits)
    server.runtime.UpdateContainerResources(request, timeout=30)


def test_an_unknown_call_is_not_logged(server: Server) -> None:
    log = Log(server)
    call = server.channel.unary_unary(
        "/runtime.v1.RuntimeService/NoSuchCall",
        request_serializer=bytes,
        response_deserializer=bytes,
    )
    assert code_of(lambda: call(b"", timeout=10)) == grpc.StatusCode.UNIMPLEMENTED
    assert code_of(lambda: server.status("nowhere")) == grpc.StatusCode.NOT_FOUND
    assert log.records() == []
