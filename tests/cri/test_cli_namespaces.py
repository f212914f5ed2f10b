"""Tests pods of one name in two namespaces: every verb can name either of them, and lists
distinguish them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import call, ok
from tests.cri.server_harness import Server


@pytest.fixture(scope="module")
def twins(module_server: Server) -> Iterator[Server]:
    """Run pod `web` with container `c` in the namespaces blue and green."""
    for namespace in ("blue", "green"):
        config = module_server.pod_config("web")
        config.metadata.namespace, config.metadata.uid = namespace, namespace
        pod = module_server.run_pod(config)
        module_server.launch(
            pod,
            module_server.container_config(envs=[api.KeyValue(key="N", value=namespace.encode())]),
        )
    yield module_server
    module_server.remove_all()


def test_an_ambiguous_name_lists_its_meanings(twins: Server) -> None:
    for name in ("c", "web/c", "web"):
        error = call(twins, "update", "--memory", "64Mi", name).error
        assert "fits 2 containers: blue/web/c, green/web/c; use NAMESPACE/POD/NAME" in error, name
    error = call(twins, "inspectp", "web").error
    assert "'web' fits 2 pods: blue/web (" in error and "use NAMESPACE/NAME" in error


@pytest.mark.parametrize("name", ["green/web/c", "green/web"])
def test_the_namespace_selects_the_pod(twins: Server, name: str) -> None:
    (green,) = (p.id for p in twins.pods() if p.metadata.namespace == "green")
    (container,) = twins.containers(pod_sandbox_id=green)
    status = ok(twins, "inspect", "--type", "container", name).json
    assert status["status"]["id"] == container.id
    assert ok(twins, "update", "--memory", "64Mi", name).out == f"{name}\n"
    assert [line.split()[0] for line in ok(twins, "stats", "--seconds", "0", name).lines[1:]] == [
        container.id[:12]
    ]
    assert call(twins, "inspect", "--type", "container", f"red/web/{name[-1]}").error.startswith(
        "no such"
    )


def test_lists_show_the_namespace_where_names_are_shared(twins: Server) -> None:
    header, *rows = ok(twins, "ps").lines
    assert header.split()[:3] == ["CONTAINER", "NAMESPACE", "POD"]
    assert {tuple(row.split()[1:4]) for row in rows} == {
        ("blue", "web", "c"),
        ("green", "web", "c"),
    }
    assert "NAMESPACE" in ok(twins, "stats", "--seconds", "0").lines[0]
    assert set(ok(twins, "ps", "-o", "name").lines) == {"blue/web/c", "green/web/c"}
    assert ok(twins, "ps", "-o", "name", "--pod", "blue/web").lines == ["blue/web/c"]


def test_lists_of_a_single_namespace_show_its_name_only_when_wide(twins: Server) -> None:
    green = ["--namespace", "green"]
    assert "NAMESPACE" in ok(twins, "ps", "-o", "wide", *green).lines[0]
    (pod,) = (p.id for p in twins.pods() if p.metadata.namespace == "blue")
    twins.remove_pod(pod)
    assert (
        "NAMESPACE" not in ok(twins, "ps").lines[0]
        and "NAMESPACE" in ok(twins, "ps", "-o", "wide").lines[0]
    )
    assert ok(twins, "ps", "-o", "name").lines == ["web/c"]
