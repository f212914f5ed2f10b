"""ListMetricDescriptors: the metrics that pods will have, read once by kubelet."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server

BASE = {"pod", "namespace", "container", "id", "image"}
# What critest knows, without container_.
NAMES = """
cpu_usage_seconds_total cpu_user_seconds_total cpu_system_seconds_total cpu_cfs_periods_total
cpu_cfs_throttled_periods_total cpu_cfs_throttled_seconds_total memory_cache memory_rss
memory_swap memory_mapped_file memory_kernel_usage memory_failcnt memory_usage_bytes
memory_max_usage_bytes memory_working_set_bytes memory_failures_total oom_events_total
fs_inodes_free fs_inodes_total fs_limit_bytes fs_usage_bytes fs_reads_total fs_reads_bytes_total
fs_writes_total fs_writes_bytes_total blkio_device_usage_total network_receive_bytes_total
network_receive_errors_total network_receive_packets_total network_receive_packets_dropped_total
network_transmit_bytes_total network_transmit_errors_total network_transmit_packets_total
network_transmit_packets_dropped_total processes threads threads_max sockets file_descriptors
last_seen start_time_seconds spec_cpu_period spec_cpu_shares spec_memory_limit_bytes
spec_memory_swap_limit_bytes spec_cpu_quota spec_memory_reservation_limit_bytes
hugetlb_usage_bytes hugetlb_max_usage_bytes ulimits_soft pressure_cpu_stalled_seconds_total
pressure_cpu_waiting_seconds_total pressure_io_stalled_seconds_total
pressure_io_waiting_seconds_total pressure_memory_stalled_seconds_total
pressure_memory_waiting_seconds_total
"""


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
def test_names_help_and_labels(server: Server) -> None:
    """The same before there is a pod and after."""
    before = server.runtime.ListMetricDescriptors(api.ListMetricDescriptorsRequest())
    assert {d.name for d in before.descriptors} == {f"container_{name}" for name in NAMES.split()}
    assert len(before.descriptors) == 56
    for each in before.descriptors:
        assert each.help and set(each.label_keys) >= BASE, each
        assert len(set(each.label_keys)) == len(each.label_keys)
    server.launch(server.run_pod())
    assert server.runtime.ListMetricDescriptors(api.ListMetricDescriptorsRequest()) == before
