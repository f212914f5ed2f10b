"""Tests `/metrics` and `/healthz` of a real server, the dashboard and the alerts that use them, and
`pyrunc-cri debug`."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import local_command_line
from tests.cri.server_harness import REPOSITORY, Server
from tests.support.processes import wait_until

CONTRIB = Path(REPOSITORY) / "contrib"
NAME = re.compile(r"\bpyrunc_[a-z_]+")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "metrics.sock"


@pytest.fixture(scope="module")
def server(address: Path) -> Iterator[Server]:
    with Server(settings={"metrics": {"address": f"unix://{address}"}}) as server:
        server.load_image()
        yield server


class Connection(http.client.HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


def get(path: Path, target: str) -> tuple[int, str]:
    connection = Connection(path)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(path: Path) -> dict[str, Metric]:
    status, text = get(path, "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float:
    family = metrics.get(name) or metrics[re.sub("_(count|sum|bucket|total)$", "", name)]
    return sum(
        s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()
    )


def test_metrics_count_the_calls_of_a_pods_life(server: Server, address: Path) -> None:
    before = scrape(address)
    pod = server.run_pod(server.pod_config("counted"))
    container = server.launch(pod)
    with pytest.raises(grpc.RpcError):
        server.status("none")
    up = scrape(address)

    def more(name: str, **labels: str) -> float:
        return value(up, name, **labels) - value(before, name, **labels)

    calls = "pyrunc_call_duration_seconds_count"
    assert (
        more(calls, call="RunPodSandbox", code="OK")
        == more(calls, call="StartContainer", code="OK")
        == 1
    )
    assert more(calls, call="ContainerStatus", code="NOT_FOUND") == 1
    assert more("pyrunc_call_duration_seconds_sum", call="RunPodSandbox") > 0
    assert more("pyrunc_step_duration_seconds_count", verb="run_sandbox", step="network") == 1
    assert (
        more("pyrunc_sandboxes", state="ready") == more("pyrunc_containers", state="running") == 1
    )
    assert (
        more("pyrunc_shims", state="connected") == 1
        and value(up, "pyrunc_shims", state="silent") == 0
    )
    assert (
        more("pyrunc_network_attachments")
        == more("pyrunc_network_leases", network="pods", family="ipv4")
        == 1
    )
    assert value(up, "pyrunc_network_addresses") == 65534 and value(up, "pyrunc_images") == 1
    assert value(up, "pyrunc_keeper_up") == 1
    assert (
        value(up, "pyrunc_zygote_up", role="shims")
        == value(up, "pyrunc_zygote_up", role="errands")
        == 1
    )
    server.stop_container(container)
    server.remove_pod(pod)
    down = scrape(address)
    exits = "pyrunc_container_exits_total"
    assert value(down, exits, reason="Error") - value(up, exits, reason="Error") == 1
    assert value(down, "pyrunc_sandboxes") == value(before, "pyrunc_sandboxes")
    assert value(down, "pyrunc_network_leases") == value(before, "pyrunc_network_leases")
    assert value(down, "process_resident_memory_bytes") > 1e6


def test_metrics_include_the_series_of_pods(server: Server, address: Path) -> None:
    """`/metrics` has the series that kubelet makes from ListPodSandboxMetrics."""
    container = server.launch(server.run_pod())
    samples = of_pods(address)
    own = [s for s in samples if s.labels["id"] == container]
    assert {s.labels["container"] for s in own} == {server.status(container).metadata.name}
    described = server.runtime.ListMetricDescriptors(api.ListMetricDescriptorsRequest()).descriptors
    assert {s.name for s in samples} <= {d.name for d in described}
    assert {
        "container_cpu_usage_seconds_total",
        "container_memory_working_set_bytes",
        "container_memory_failcnt",
    } <= {s.name for s in own}
    (received,) = [s for s in samples if s.name == "container_network_receive_bytes_total"]
    assert received.labels["pod"] and received.labels["interface"] == "eth0"
    server.remove_all()
    assert not of_pods(address)


def of_pods(address: Path) -> list[Any]:
    status, text = get(address, "/metrics/cadvisor")
    assert status == 200
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


def test_an_open_exec_session_is_counted(server: Server, address: Path) -> None:
    pod = server.run_pod(server.pod_config("session"))
    container = server.launch(pod)
    command = [
        *(
            "nsenter",
            f"--net=/proc/{server.pid}/ns/net",
            "--",
            sys.executable,
            "-m",
            "cri_server.cli.main",
        ),
        *("--address", f"unix://{server.socket}", "exec", "-i", container, "cat"),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"hello\n"
        assert value(scrape(address), "pyrunc_sessions", kind="exec") == 1
        process.stdin.close()
        assert process.wait(30) == 0
    assert wait_until(lambda: value(scrape(address), "pyrunc_sessions") == 0, 30)
    server.remove_pod(pod)


def test_promtool_accepts_the_metrics(server: Server, address: Path) -> None:
    """The metrics follow the rules of `promtool check metrics` that apply to them."""
    server.pods()
    text = get(address, "/metrics")[1]
    assert text.endswith("\n")
    families = list(text_string_to_metric_families(text))
    assert len({f.name for f in families}) == len(families) > 20
    for family in families:
        assert family.documentation and family.type in (
            "gauge",
            "counter",
            "histogram",
        ), family.name
        assert re.fullmatch("(pyrunc|process)(_[a-z]+)+", family.name), family.name
        if family.name.startswith("pyrunc_"):
            assert family.documentation.endswith("."), family.name
            assert not re.search("_(total|count|sum|bucket|ms|milliseconds)$", family.name), (
                family.name
            )
        seen = [(s.name, *sorted(s.labels.items())) for s in family.samples]
        assert len(set(seen)) == len(seen)
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples)
        if family.type == "histogram":
            _check_histogram(family)


def _check_histogram(family: Metric) -> None:
    assert family.name.endswith("_seconds")
    series: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
    counts = {
        tuple(sorted(s.labels.items())): s.value
        for s in family.samples
        if s.name.endswith("_count")
    }
    for key, buckets in series.items():
        assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(
            v for _, v in buckets
        )
        assert buckets[-1] == (float("inf"), counts[key])


def test_dashboard_and_alerts_use_existing_metrics(server: Server, address: Path) -> None:
    server.remove_pod(server.run_pod())
    samples = {s.name for family in scrape(address).values() for s in family.samples}
    # A counter without a sample also has its name.
    samples |= {
        f"{name}_total" for name, family in scrape(address).items() if family.type == "counter"
    }
    rules = yaml.safe_load((CONTRIB / "prometheus/rules.yml").read_text())
    dashboard = json.loads((CONTRIB / "grafana/pyrunc.json").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    queries = [alert["expr"] for alert in alerts]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        assert set(NAME.findall(query)) <= samples, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    assert all({"alert", "expr", "labels", "annotations"} <= set(alert) for alert in alerts)
    assert len({p["id"] for p in dashboard["panels"]}) == len(dashboard["panels"])
    used = {name for query in queries for name in NAME.findall(query)}
    assert {
        "pyrunc_call_duration_seconds_bucket",
        "pyrunc_network_leases",
        "pyrunc_sessions",
    } <= used


def test_the_health_endpoint_answers(server: Server, address: Path) -> None:
    assert get(address, "/healthz") == (200, "ok\n")


def test_metrics_are_off_by_default_and_cost_nothing() -> None:
    with Server(network=False) as server:
        server.pods()
        script = (
            "import sys, cri_server.app; print([m for m in sys.modules if"
            " m.startswith(('prometheus', 'cri_server.tele'))])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, cwd=REPOSITORY, check=True
        )
        assert done.stdout == b"[]\n"
        assert "metrics at" not in server.tail(500)


def test_a_full_root_is_not_healthy(tmp_path: Path) -> None:
    address = tmp_path / "metrics.sock"
    with Server(
        network=False, settings={"metrics": {"address": f"unix://{address}"}}, disk_bytes=4 << 20
    ) as full:
        filler = full.root / "filler"
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        status, text = get(address, "/healthz")
        assert status == 503 and text == f"no space left below {full.root}\n"
        filler.unlink()
        assert get(address, "/healthz") == (200, "ok\n")


# -- debug


def cli(server: Server, *words: str) -> str:
    command = local_command_line(server, *words)
    return subprocess.run(
        command, capture_output=True, cwd=REPOSITORY, check=True, timeout=60
    ).stdout.decode()


def test_debug_stacks_shows_threads_and_tasks(server: Server) -> None:
    text = cli(server, "debug", "stacks")
    assert "thread MainThread" in text and "cri_server/app.py" in text and "in _reconcile\n" in text
    assert "waits for " in text


def test_the_debug_endpoint_returns_a_profile(server: Server) -> None:
    folded = cli(server, "debug", "profile", "0.3", "--folded").splitlines()
    assert folded and all(re.fullmatch(r"[^ ]+(;[^ ]+)* \d+", line) for line in folded), folded
    assert any(line.startswith("MainThread;") for line in folded)
    output = cli(server, "debug", "profile", "0.3")
    assert "with calls" in output and re.search(r"100\.0%", output)


def test_sigusr1_logs_the_threads_of_a_server_that_hangs(server: Server) -> None:
    os.kill(server.pid, signal.SIGUSR1)
    assert wait_until(
        lambda: "Current thread" in server.tail(500) and "app.py" in server.tail(500), 30
    )
    assert server.runtime.Version(api.VersionRequest(), timeout=30).runtime_name == "pyrunc"
