"""Tests that a limit of processes leaves room for the placeholder process in the container's
systemd scope. The scope is a folder with plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pyrunc.cgroups.group import Cgroup
from pyrunc.kernel import cgroup as tree


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroup:
    """Return a scope with a placeholder process."""
    monkeypatch.setattr(tree, "_root", str(tmp_path))
    (tmp_path / "a.scope").mkdir()
    (tmp_path / "a.scope" / "pids.max").write_text("")
    group = Cgroup("/a.scope", "systemd", "a.slice", "a.scope")
    # In place of the pipe to a placeholder that another process has forked.
    group.take_placeholder(os.open("/dev/null", os.O_RDONLY))
    return group


@pytest.mark.parametrize(
    ("resources", "before", "after"),
    [
        ({"pids": {"limit": 1}}, "2", "1"),
        ({"pids": {"limit": 0}}, "2", "1"),
        ({"unified": {"pids.max": "1"}}, "2", "1"),
        ({"pids": {"limit": 2}}, "2", "2"),
        ({"pids": {"limit": -1}}, "max", "max"),
    ],
)
def test_a_limit_of_one_process_leaves_room_for_the_placeholder(
    scope: Cgroup, resources: dict[str, object], before: str, after: str
) -> None:
    pids_max = Path(scope.directory, "pids.max")
    scope.apply(resources)
    assert pids_max.read_text() == before
    scope.occupied()
    assert pids_max.read_text() == after


def test_a_scope_that_ended_with_its_process_is_no_error(scope: Cgroup) -> None:
    scope.apply({"pids": {"limit": 1}})
    Path(scope.directory, "pids.max").unlink()
    Path(scope.directory).rmdir()
    scope.occupied()
    assert not scope.exists()
