"""Runs containerd's CRI integration tests that need cgroup v2's memory and cpuset controllers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cri.containerd import harness, images, selection


@pytest.mark.slow
@pytest.mark.timeout(harness.TIMEOUT_S + 600)
def test_containerds_tests_that_need_controllers_pass(tmp_path: Path) -> None:
    with harness.against_a_server(tmp_path, images.of_a_shell()) as suite:
        states, output = suite.run(selection.NEED_CONTROLLERS)
        assert states == dict.fromkeys(selection.NEED_CONTROLLERS, "PASS"), output[-100_000:]
        assert not suite.server.pods() and not suite.server.containers()
