"""Tests histograms in Prometheus' format, and the metric of a network's leased addresses."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cni_plugins.protocol.config import parse_list_object
from cri_server.network.leases import LeaseUsage, usage
from cri_server.observability.meters import BOUNDS_S, Meters
from cri_server.observability.telemetry.exposition import write
from cri_server.observability.telemetry.snapshot import Family, Histogram


def test_buckets_are_cumulative() -> None:
    meters = Meters()
    for seconds in (0.00005, BOUNDS_S[0], 0.3, 1e6):
        meters.add("RunPodSandbox", "OK", seconds)
    samples = {key: (list(d.counts), d.sum_s) for key, d in meters.items()}
    body, kind = write([Histogram("pyrunc_x_seconds", "x", ("call", "code"), samples)], "")
    assert kind.startswith("text/plain")
    (family,) = [
        f for f in text_string_to_metric_families(body.decode()) if f.name == "pyrunc_x_seconds"
    ]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (
        buckets[str(BOUNDS_S[0])] == 2
        and buckets["0.25"] == 2
        and buckets["0.5"] == 3
        and buckets["300.0"] == 3
    )
    assert (
        buckets["+Inf"] == 4 == next(s.value for s in family.samples if s.name.endswith("_count"))
    )
    assert {s.labels["call"] for s in family.samples} == {"RunPodSandbox"}


def test_labels_with_special_characters_are_escaped() -> None:
    nasty = 'a"b\\c\nd'
    family = Family("pyrunc_x", "counter", "x", ("name",), {(nasty,): 3})
    body, kind = write([family], "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
    plain, _ = write([family], "")
    (parsed,) = [f for f in text_string_to_metric_families(plain.decode()) if f.name == "pyrunc_x"]
    assert [(s.name, s.labels["name"], s.value) for s in parsed.samples] == [
        ("pyrunc_x_total", nasty, 3)
    ]


def test_leases_are_counted(tmp_path: Path) -> None:
    ipam = {
        "type": "host-local",
        "dataDir": str(tmp_path),
        "ranges": [
            [
                {"subnet": "10.1.0.0/24"},
                {"subnet": "10.2.0.0/16", "rangeStart": "10.2.0.10", "rangeEnd": "10.2.0.19"},
            ],
            [{"subnet": "fd00::/120"}, {"subnet": "nonsense"}],
        ],
    }
    plugins = [{"type": "bridge", "ipam": ipam}, {"type": "portmap"}]
    network = parse_list_object(
        json.loads(json.dumps({"cniVersion": "1.0.0", "name": "n", "plugins": plugins}))
    )
    assert usage(network) == [LeaseUsage("n", 4, 0, 264), LeaseUsage("n", 6, 0, 254)]
    (tmp_path / "n" / "owners").mkdir(parents=True)
    for name in ("10.1.0.2", "10.2.0.11", "fd00::3", "lock", "last_reserved_ip.0"):
        (tmp_path / "n" / name).touch()
    assert usage(network) == [LeaseUsage("n", 4, 2, 264), LeaseUsage("n", 6, 1, 254)]
