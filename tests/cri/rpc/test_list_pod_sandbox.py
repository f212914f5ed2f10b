"""ListPodSandbox: all pods with the fields that identify them, and filters that must all match."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("3.5.1", "2.10")
def test_each_item_has_the_sandboxs_fields(server: Server) -> None:
    config = server.pod_config(labels={"a": "1", "empty": ""}, annotations={"b": "2"})
    config.metadata.attempt = 3
    pod = server.run_pod(config)
    (item,) = server.pods()
    status = server.pod_status(pod)
    assert (
        item.id == pod and item.metadata == config.metadata and item.created_at == status.created_at
    )
    assert dict(item.labels) == {"a": "1", "empty": ""} and dict(item.annotations) == {"b": "2"}
    assert item.state == api.SANDBOX_READY and item.runtime_handler == status.runtime_handler
    server.stop_pod(pod)
    assert [(p.id, p.state) for p in server.pods()] == [(pod, api.SANDBOX_NOTREADY)]


@pytest.mark.requirement("2.10", "1.9", "1.a.5")
def test_pods_can_be_filtered(server: Server) -> None:
    first = server.run_pod(server.pod_config(labels={"app": "a", "tier": "x"}))
    second = server.run_pod(server.pod_config(labels={"app": "b", "tier": "x"}))
    ready = api.PodSandboxStateValue(state=api.SANDBOX_READY)
    assert {p.id for p in server.pods(state=ready)} == {first, second}
    assert {p.id for p in server.pods(label_selector={"app": "a", "tier": "x"})} == {first}
    assert not server.pods(label_selector={"app": "a", "tier": "y"})
    assert {p.id for p in server.pods(id=second[:13])} == {second}
    assert not server.pods(id=second, label_selector={"app": "a"})
    assert not server.pods(id="f" * 64)
    server.stop_pod(first)
    assert {p.id for p in server.pods(state=ready)} == {second}
    everything = server.runtime.ListPodSandbox(api.ListPodSandboxRequest()).items
    assert {p.id for p in everything} == {first, second}
