"""Status: conditions, handlers and features of the runtime."""

from __future__ import annotations

import json

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server


@pytest.mark.requirement("1.b.5")
def test_runtime_and_network_are_ready(server: Server) -> None:
    status = server.runtime.Status(api.StatusRequest()).status
    assert {c.type: c.status for c in status.conditions} == {
        "RuntimeReady": True,
        "NetworkReady": True,
    }


@pytest.mark.requirement("10.5.1", "3.1.3")
def test_the_status_reports_a_node_without_a_network() -> None:
    """Without a network configuration, the status tells why pods are refused; pods with host
    networking run."""
    with Server(network=False) as server:
        conditions = {
            c.type: c for c in server.runtime.Status(api.StatusRequest()).status.conditions
        }
        assert conditions["RuntimeReady"].status and not conditions["NetworkReady"].status
        assert conditions["NetworkReady"].reason == "NetworkPluginNotReady"
        assert str(server.folder / "net.d") in conditions["NetworkReady"].message
        with pytest.raises(Exception, match=r"net\.d"):
            server.run_pod()
        assert not server.pods()
        server.run_pod(host_network=True)


@pytest.mark.requirement("10.5.2", "10.5.3")
def test_a_status_has_handlers_and_features(server: Server) -> None:
    status = server.runtime.Status(api.StatusRequest())
    handlers = {h.name: h.features for h in status.runtime_handlers}
    assert "" in handlers and len(handlers) > 1
    assert handlers[""].recursive_read_only_mounts and handlers[""].user_namespaces
    assert status.features.supplemental_groups_policy
    assert status.features.user_namespaces_host_network and status.features.mount_options


@pytest.mark.requirement("10.5.4")
def test_the_verbose_status_has_the_folders(server: Server) -> None:
    assert not server.runtime.Status(api.StatusRequest()).info
    config = json.loads(server.runtime.Status(api.StatusRequest(verbose=True)).info["config"])
    assert (config["stateDir"], config["rootDir"]) == (str(server.state), str(server.root))
