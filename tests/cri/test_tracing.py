"""Tests calls as spans of OpenTelemetry: a collector gets them, as children of the caller's spans,
and no call waits for the collector."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import PROGRAM, local_command_line
from tests.cri.server_harness import REPOSITORY, Server
from tests.support.processes import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextlib.contextmanager
def collector(server: Server, path: Path, *how: str) -> Iterator[int]:
    """Run a collector of spans on the server's loopback address; return its port."""
    command = server.in_its_network(
        sys.executable, "-m", "tests.support.otlp_collector", str(path), *how
    )
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def tracing(tmp_path: Path, *how: str, **settings: Any) -> Iterator[Server]:
    """Provide a server that sends its spans to a collector, which writes them to `spans`."""
    with Server(network=False) as server, collector(server, tmp_path / "spans", *how) as port:
        server.load_image()
        server.stop()
        server._settings["tracing"] = {"endpoint": f"http://127.0.0.1:{port}", **settings}
        server._write_config()
        server.start()
        yield server


def spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_pod(server: Server, name: str, traceparent: str = "") -> str:
    request = api.RunPodSandboxRequest(config=server.pod_config(name))
    request.config.linux.security_context.namespace_options.network = api.NODE
    metadata = [("traceparent", traceparent)] if traceparent else []
    return str(server.runtime.RunPodSandbox(request, timeout=60, metadata=metadata).pod_sandbox_id)


def test_each_sampled_call_sends_its_spans(tmp_path: Path) -> None:
    with tracing(tmp_path) as server:
        pod = run_pod(server, "web", f"00-{TRACE}-{SPAN}-01")
        unsampled = run_pod(server, "silent", f"00-{TRACE[::-1]}-{SPAN}-00")
        wrong = server.create(pod, server.container_config(["/no/such/program"]))
        with pytest.raises(grpc.RpcError):
            server.start_container(wrong)
        server.stop()  # sends waiting spans
        by_name = spans(tmp_path / "spans")
        by_id = {span["id"]: span for span in by_name}
        roots = {span["name"]: span for span in by_name if span["parent"] not in by_id}
        assert set(roots) == {"RunPodSandbox", "CreateContainer", "StartContainer"}
        ran, started = roots["RunPodSandbox"], roots["StartContainer"]
        assert {span["service"] for span in by_name} == {"pyrunc-cri"} and {
            s["path"] for s in by_name
        } == {"/v1/traces"}
        assert (ran["trace"], ran["parent"], ran["failed"]) == (TRACE, SPAN, False)
        assert ran["attributes"] == {
            **ran["attributes"],
            "k8s.namespace.name": "default",
            "k8s.pod.name": "web",
            "pyrunc.pod_id": pod,
            "rpc.method": "RunPodSandbox",
            "rpc.response.status_code": "OK",
        }
        assert unsampled not in json.dumps(by_name), "the caller has decided against sampling"
        assert (
            started["failed"] and "/no/such/program" in started["words"] and started["parent"] == ""
        )
        assert started["attributes"]["pyrunc.failed_step"] == "execute"
        assert {s["name"] for s in by_name if s["parent"] == started["id"] and s["failed"]} == {
            "execute"
        }
        assert "pause" in {span["name"] for span in by_name if span["parent"] == ran["id"]}
        for span in by_name:
            parent = by_id.get(span["parent"])
            assert span["begin_ns"] <= span["end_ns"]
            if parent:
                assert (
                    span["trace"] == parent["trace"]
                    and span["begin_ns"] >= parent["begin_ns"] - 1000
                )
        server.start()
        command = local_command_line(server, "timeline", "web", "--json")
        calls = json.loads(subprocess.check_output(command, cwd=REPOSITORY))
        assert calls[0]["traceparent"] == f"00-{TRACE}-{SPAN}-01" and "traceparent" not in calls[1]


def test_sampling_applies_to_calls_without_traceparent(tmp_path: Path) -> None:
    with tracing(tmp_path, sampling=0.0) as server:
        run_pod(server, "unasked")
        run_pod(server, "malformed", "00-not-a-trace")
        run_pod(server, "asked", f"00-{TRACE}-{SPAN}-01")
        server.stop()
        named = {span["attributes"].get("k8s.pod.name") for span in spans(tmp_path / "spans")}
        assert named - {None} == {"asked"}
        server.start()


def test_a_hanging_or_missing_collector_does_not_slow_calls(tmp_path: Path) -> None:
    with tracing(tmp_path, "hang") as server:
        for number in range(5):
            server.remove_pod(run_pod(server, f"web{number}"))
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 20, (
            "the server waited for a collector that does not answer"
        )
        server._settings["tracing"] = {"endpoint": "http://127.0.0.1:9"}
        server._write_config()
        server.start()
        server.remove_pod(run_pod(server, "last"))
        assert wait_until(lambda: " ERROR opentelemetry" in server.tail(1000), 60), (
            "logged once per batch"
        )
        server.remove_pod(run_pod(server, "after"))


def test_tracing_is_off_by_default_and_costs_nothing() -> None:
    code = (
        "import cri_server.app, sys; print([m for m in sys.modules if 'opentelemetry' in m or m =="
        " 'requests'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_error_names_the_missing_library(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError(name='opentelemetry')")
    (tmp_path / "config.toml").write_text('[tracing]\nendpoint = "http://127.0.0.1:4318"\n')
    command = [*PROGRAM, "serve", "--config", f"{tmp_path}/config.toml"]
    command += [
        "--listen",
        f"unix://{tmp_path}/s",
        "--root",
        f"{tmp_path}/root",
        "--state",
        f"{tmp_path}/state",
    ]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 1
        and "tracing.endpoint: opentelemetry is not installed: pip install" in done.stderr
    ), done


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "grpc://collector:4317", "http://", "http://host:99999", "unix:///run/x"],
)
def test_the_error_names_an_invalid_endpoint(tmp_path: Path, endpoint: str) -> None:
    (tmp_path / "config.toml").write_text(f"[tracing]\nendpoint = {json.dumps(endpoint)}\n")
    command = [*PROGRAM, "serve", "--config", f"{tmp_path}/config.toml"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 1
        and f"tracing.endpoint: {endpoint!r} is not http[s]://HOST:PORT" in done.stderr
    )
