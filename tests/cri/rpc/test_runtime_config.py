"""RuntimeConfig: the cgroup driver, which kubelet then uses, too."""

from __future__ import annotations

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, message_of


@pytest.mark.requirement("7.1.1", "13.17", "13.12", "12.4")
def test_the_reported_cgroup_driver_is_the_used_one(server: Server) -> None:
    """With the driver cgroupfs, a cgroup parent in the form of the systemd driver is refused."""
    linux = server.runtime.RuntimeConfig(api.RuntimeConfigRequest()).linux
    assert linux.cgroup_driver == api.CGROUPFS == 1
    config = server.pod_config(linux=api.LinuxPodSandboxConfig(cgroup_parent="kubepods-pod1.slice"))
    assert "kubepods-pod1.slice" in message_of(lambda: server.run_pod(config))
    assert not server.pods()
