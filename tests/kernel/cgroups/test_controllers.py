"""Tests that `Cgroup.create` enables the controllers in the parents of a cgroup."""

from __future__ import annotations

import pytest

from pyrunc.cgroups import group as groups
from pyrunc.cgroups.group import Cgroup
from pyrunc.kernel import cgroup as tree
from tests.support.groups import own_group


def test_a_parent_that_lost_a_controller_gets_it_again() -> None:
    with own_group("controllers") as top:
        parent = top / "parent"
        path = f"/{parent.relative_to(tree.root())}"
        Cgroup(f"{path}/first").create()
        enabled = (parent / "cgroup.subtree_control").read_text().split()
        if not enabled:
            pytest.skip("the v2 tree has no controller")
        (parent / "cgroup.subtree_control").write_text(f"-{enabled[0]}")
        Cgroup(f"{path}/second").create()
        assert (parent / "cgroup.subtree_control").read_text().split() == enabled
        for name in ("first", "second"):
            Cgroup(f"{path}/{name}").remove()


def test_no_parent_is_looked_at_when_the_last_enables_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with own_group("controllers") as top:
        path = f"/{(top / 'parent').relative_to(tree.root())}"
        Cgroup(f"{path}/first").create()
        if not tree.controllers(tree.root()):
            pytest.skip("the v2 tree has no controller")
        monkeypatch.setattr(groups, "_enable_controllers", None)
        Cgroup(f"{path}/second").create()
        assert (top / "parent" / "second").is_dir()
        for name in ("first", "second"):
            Cgroup(f"{path}/{name}").remove()
