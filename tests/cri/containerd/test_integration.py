"""Runs containerd's own CRI integration tests against a real pyrunc server: those that use only CRI
or NRI must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cri.containerd import harness, images, selection


@pytest.mark.slow
@pytest.mark.timeout(harness.TIMEOUT_S + 1200)
def test_all_applicable_tests_pass(tmp_path: Path) -> None:
    with harness.against_a_server(tmp_path, images.all_of_them()) as suite:
        listed = {
            *selection.APPLY,
            *selection.NEED_CONTROLLERS,
            *selection.DIFFERENT,
            *selection.NOT_OURS,
        }
        assert suite.names() == listed, "the suite has other tests"

        chosen = [*selection.APPLY, *(selection.NEED_CONTROLLERS if _has_controllers() else ())]
        states, output = suite.run(chosen)
        assert {*states.values()} <= {"PASS", "SKIP"} and set(states) == {*chosen}, output[
            -100_000:
        ]
        assert list(states.values()).count("PASS") >= selection.FEWEST
        assert not suite.server.pods() and not suite.server.containers()


def _has_controllers() -> bool:
    there = Path("/sys/fs/cgroup/cgroup.controllers")
    return there.exists() and {"memory", "cpuset"} <= {*there.read_text().split()}
