"""Tests the server under its systemd unit: it reports that it is ready, is restarted when it dies
or hangs, and its pods stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.pods import pod, shell
from tests.vm.kubelet.api import Json
from tests.vm.kubelet.node import Node, systemctl

UNIT = "pyrunc-cri"
DROP_IN = Path("/run/systemd/system/pyrunc-cri.service.d/test.conf")


@pytest.fixture(scope="module")
def survivor(node: Node) -> Iterator[Json]:
    try:
        yield node.run(pod("survivor", shell("sleep 3600")))
    finally:
        node.remove("survivor")


def unit_property(name: str) -> str:
    return systemctl("show", "-P", name, UNIT)


def back(node: Node, old_pid: int) -> None:
    """Wait until the unit is active with another main process."""
    node.until(
        lambda: (
            unit_property("ActiveState") == "active"
            and int(unit_property("MainPID")) not in (0, old_pid)
        ),
        "the next server",
    )


def still_there(node: Node, survivor: Json, pid: int) -> None:
    """Assert that the process of the pod `survivor` is the same and that kubelet has not restarted
    it."""
    assert node.main_pid(survivor) == pid
    (status,) = node.pod("survivor")["status"]["containerStatuses"]
    assert (status["restartCount"], "running" in status["state"]) == (0, True)


def test_the_unit_has_its_settings() -> None:
    assert (unit_property("Type"), unit_property("Delegate"), unit_property("KillMode")) == (
        "notify",
        "yes",
        "process",
    )
    assert (unit_property("Restart"), unit_property("WatchdogUSec")) == ("always", "1min")


def test_systemd_restarts_a_killed_server(node: Node, survivor: Json) -> None:
    pid, server = node.main_pid(survivor), int(unit_property("MainPID"))
    os.kill(server, signal.SIGKILL)
    back(node, server)
    still_there(node, survivor, pid)


def test_a_restart_keeps_pods(node: Node, survivor: Json) -> None:
    pid = node.main_pid(survivor)
    # Type=notify: systemctl returns when the new server has loaded its pods and serves calls.
    systemctl("restart", UNIT)
    still_there(node, survivor, pid)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_systemd_restarts_a_server_that_hangs(node: Node, survivor: Json) -> None:
    DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    DROP_IN.write_text("[Service]\nWatchdogSec=20\n")
    try:
        systemctl("daemon-reload")
        systemctl("restart", UNIT)
        pid, server = node.main_pid(survivor), int(unit_property("MainPID"))
        os.kill(server, signal.SIGSTOP)
        back(node, server)
        assert unit_property("NRestarts") != "0"
        still_there(node, survivor, pid)
    finally:
        DROP_IN.unlink()
        systemctl("daemon-reload")
        systemctl("restart", UNIT)
