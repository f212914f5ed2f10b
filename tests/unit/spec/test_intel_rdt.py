"""Tests `linux.intelRdt` on a tree of plain files: groups that are written, kept, removed and
refused. Whether a kernel accepts the lines is not tested, because the test machines have no
resctrl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyrunc.errors import InvalidSpec, KernelError, Unsupported
from pyrunc.launch import rdt
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo


class Tree:
    """A resctrl tree of plain files. `group` makes a group with its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.group("", "L3:0=fff;1=fff\n    MB:0=100;1=100\n")
        (root / "info").mkdir()
        (root / "info/last_cmd_status").write_text("Mask out of range\n")

    def group(self, name: str, schemata: str = "L3:0=fff;1=fff\n") -> Path:
        folder = self.root / name
        (folder / "mon_groups").mkdir(parents=True, exist_ok=True)
        (folder / "tasks").touch()
        (folder / "schemata").write_text(schemata)
        return folder


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    resctrl = Tree(tmp_path)

    def make(group: str) -> None:
        resctrl.group(str(Path(group).relative_to(tmp_path)))

    monkeypatch.setattr(rdt, "_make_group", make)
    return resctrl


def enter(tree: Tree, intel_rdt: dict[str, Any], undo: Undo | None = None) -> None:
    rdt.enter(intel_rdt, "box", 77, undo or Undo(), str(tree.root))


def test_a_container_gets_a_new_group(tree: Tree) -> None:
    enter(tree, {"l3CacheSchema": "L3:0=f", "memBwSchema": "MB:0=20", "schemata": ["L2:0=3"]})
    assert (tree.root / "box/schemata").read_text().splitlines()[:3] == [
        "L3:0=f",
        "MB:0=20",
        "L2:0=3",
    ]
    assert (tree.root / "box/tasks").read_text() == "77"


def test_an_existing_group_is_joined_when_its_schemata_match(tree: Tree) -> None:
    tree.group("gold", "L3:0=00f;1=fff\nMB:0=100;1=50\n")
    for requests in (
        {},
        {"l3CacheSchema": "L3:0=f"},
        {"memBwSchema": "MB:1=50"},
        {"schemata": ["L3:1=fff"]},
    ):
        enter(tree, {"closID": "gold", **requests})
    assert (tree.root / "gold/tasks").read_text() == "77"
    assert (tree.root / "gold/schemata").read_text().startswith("L3:0=00f"), "another's group"
    with pytest.raises(
        InvalidSpec,
        match=r"linux\.intelRdt\.closID: .*gold are not 'L3:0=1'",
    ):
        enter(tree, {"closID": "gold", "l3CacheSchema": "L3:0=1"})


def test_a_missing_group_is_made_only_with_schemata(tree: Tree) -> None:
    with pytest.raises(InvalidSpec, match="silver does not exist"):
        enter(tree, {"closID": "silver"})
    enter(tree, {"closID": "silver", "memBwSchema": "MB:0=20"})
    assert (tree.root / "silver/tasks").read_text() == "77"


def test_the_root_group_can_be_used(tree: Tree) -> None:
    enter(tree, {"closID": "/"})
    assert (tree.root / "tasks").read_text() == "77"


def test_a_monitoring_group_is_created(tree: Tree) -> None:
    tree.group("gold")
    enter(tree, {"closID": "gold", "enableMonitoring": True})
    assert (tree.root / "gold/mon_groups/box/tasks").read_text() == "77"
    rdt.join({"closID": "gold", "enableMonitoring": True}, "box", 78, str(tree.root))
    assert (tree.root / "gold/mon_groups/box/tasks").read_text() == "78"


def test_only_groups_of_the_container_are_removed(tmp_path: Path) -> None:
    # Empty folders, because rmdir(2) of a resctrl group removes its files too.
    for name in ("gold/mon_groups/box", "box"):
        (tmp_path / name).mkdir(parents=True)
    rdt.leave({"closID": "gold", "enableMonitoring": True}, "box", str(tmp_path))
    assert (tmp_path / "gold").is_dir() and not (tmp_path / "gold/mon_groups/box").exists()
    assert (tmp_path / "box").is_dir()
    for _ in range(2):
        rdt.leave({}, "box", str(tmp_path))
    assert not (tmp_path / "box").exists()


def test_a_failure_removes_the_new_group(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"'77' to '.*/box/tasks'"), Undo() as undo:
        rdt.enter({}, "box", 77, undo, str(tmp_path))
    assert not (tmp_path / "box").exists()


def test_the_error_has_the_kernels_reason(tree: Tree) -> None:
    (tree.root / "box").mkdir()
    (tree.root / "box/schemata").mkdir()
    with pytest.raises(KernelError, match="Mask out of range"):
        rdt._write_schemata(str(tree.root / "box"), ["L3:0=0"])


def test_a_missing_resctrl_is_unsupported() -> None:
    if any(" - resctrl " in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        assert rdt.mounted()
    else:
        with pytest.raises(Unsupported, match=r"linux\.intelRdt: no resctrl filesystem is mounted"):
            rdt.mounted()


@pytest.mark.parametrize(
    ("intel_rdt", "where"),
    [
        ({"closID": ".."}, "linux.intelRdt.closID"),
        ({"closID": "."}, "linux.intelRdt.closID"),
        ({"closID": "a/b"}, "linux.intelRdt.closID"),
        ({"closID": 3}, "linux.intelRdt.closID"),
        ({"l3CacheSchema": "L3:0=f\nMB:0=1"}, "linux.intelRdt"),
        ({"schemata": ["L3:0=f\n"]}, "linux.intelRdt"),
        ({"schemata": "L3:0=f"}, "linux.intelRdt.schemata"),
        ({"memBwSchema": "L3:0=f"}, "linux.intelRdt.memBwSchema"),
    ],
)
def test_invalid_requests_are_refused(intel_rdt: dict[str, Any], where: str) -> None:
    document = default()
    document["linux"]["intelRdt"] = intel_rdt
    with pytest.raises(InvalidSpec) as caught:
        check(parse(document))
    assert caught.value.path == where
