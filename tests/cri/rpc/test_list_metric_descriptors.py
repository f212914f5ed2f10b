"""ListMetricDescriptors: the metrics of pods, which kubelet reads once."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server
from tests.support.metric_names import NAMES

BASE = {"pod", "namespace", "container", "id", "image"}


@pytest.mark.requirement(
    "10.2.1",
    "10.2.2",
    "10.2.4",
    "10.2.5",
    "10.2.6",
    "10.2.7",
    "10.2.8",
    "10.2.9",
    "10.2.10",
    "10.2.11",
)
def test_descriptors_have_names_help_and_labels(server: Server) -> None:
    """The descriptors are the same before and after the first pod."""
    before = server.runtime.ListMetricDescriptors(api.ListMetricDescriptorsRequest())
    assert {d.name for d in before.descriptors} == set(NAMES)
    assert len(before.descriptors) == 56
    for each in before.descriptors:
        assert each.help and set(each.label_keys) >= BASE, each
        assert len(set(each.label_keys)) == len(each.label_keys)
    server.launch(server.run_pod())
    assert server.runtime.ListMetricDescriptors(api.ListMetricDescriptorsRequest()) == before
