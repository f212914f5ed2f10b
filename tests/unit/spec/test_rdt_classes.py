"""Tests classes of caches and memory bandwidth, on plain files instead of resctrl: the class that a
container gets, and the OCI object of a class."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from cri_server.spec import rdt as classes
from cri_server.spec import resource_classes
from pyrunc.errors import InvalidArgument, Unsupported, WrongState
from pyrunc.launch import rdt
from pyrunc.spec.check import check
from pyrunc.spec.default import default
from pyrunc.spec.parse import parse
from pyrunc.undo import Undo

FILE = """\
Classes:
  gold:
    Schemata: ["L3:0=ff0;1=ff0", "MB:0=80"]
    EnableMonitoring: true
  measured: {EnableMonitoring: true}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a resctrl tree of plain files with the group `silver`."""
    root = tmp_path / "resctrl"
    for name in ("silver", "measured", "info"):
        # The kernel makes the files of a group with its folder.
        (root / name / "mon_groups").mkdir(parents=True)
    monkeypatch.setattr(rdt, "mounted", lambda: str(root))
    return root


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "classes.yaml").write_text(FILE)
    return str(tmp_path / "classes.yaml")


def test_a_class_becomes_an_oci_object(tree: Path, file: str) -> None:
    gold = {"closID": "gold", "schemata": ["L3:0=ff0;1=ff0", "MB:0=80"], "enableMonitoring": True}
    assert classes.to_oci(file, "gold") == gold
    assert classes.to_oci(file, "measured") == {"closID": "measured", "enableMonitoring": True}
    assert classes.to_oci(file, "silver") == classes.to_oci("", "silver") == {"closID": "silver"}
    assert classes.to_oci("", "system/default") == {"closID": "/"}


def test_the_runtime_accepts_the_converted_class(tree: Path, file: str) -> None:
    document = default()
    document["linux"]["intelRdt"] = classes.to_oci(file, "gold")
    check(parse(document))
    gold = tree / "gold"
    (gold / "mon_groups" / "box").mkdir(parents=True)
    for group in (gold, gold / "mon_groups" / "box"):
        (group / "tasks").touch()
    (gold / "schemata").write_text("L3:0=ff0;1=ff0\nMB:0=80;1=100\n")
    rdt.enter(document["linux"]["intelRdt"], "box", 77, Undo(), str(tree))
    assert (gold / "tasks").read_text() == (gold / "mon_groups/box/tasks").read_text() == "77"


def test_the_group_stays_after_its_container(
    tree: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    intel_rdt = classes.to_oci(file, "measured")
    assert rdt.outlives(intel_rdt) and rdt.outlives({}) and not rdt.outlives({"closID": "silver"})
    (tree / "measured/mon_groups/box").mkdir()
    rdt.leave_mounted(intel_rdt, "box")
    assert not (tree / "measured/mon_groups/box").exists() and (tree / "measured").is_dir()
    monkeypatch.setattr(rdt, "mounted", _unmounted)
    rdt.leave_mounted(intel_rdt, "box")


@pytest.mark.parametrize("name", ["bronze", "info", "..", "a/b", "/", "mon_groups"])
def test_a_missing_class_is_refused(tree: Path, file: str, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        classes.to_oci(file, name)
    assert str(caught.value).startswith(
        f"RDT class {name!r} does not exist: it is neither a group in {tree} nor a class"
    )


def _unmounted() -> str:
    raise Unsupported("no")


def test_a_class_is_refused_without_resctrl(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdt, "mounted", _unmounted)
    with pytest.raises(WrongState, match="RDT class 'gold': the resctrl filesystem is not mounted"):
        classes.to_oci(file, "gold")


def test_the_most_specific_annotation_selects_the_class() -> None:
    pod = {
        "rdt.resources.beta.kubernetes.io/pod": "a",
        "rdt.resources.beta.kubernetes.io/container.one": "b",
    }
    own = {"io.kubernetes.cri.rdt-class": "c"}
    find = functools.partial(resource_classes.find, classes.KIND)
    assert [find(name, pod, {}) for name in ("one", "two")] == [
        "b",
        "a",
    ]
    assert find("one", pod, own) == "c" and find("one", {}, {}) == ""
    assert find("one", pod, {"io.kubernetes.cri.rdt-class": ""}) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Classes: {a: {Schemata: [L3]}}", "class 'a': 'L3' is not a schemata line"),
        ("Classes: {a: {Schemata: ['L3:0=f\\nMB:0=1']}}", "is not a schemata line"),
        ("Classes: {a: {Shemata: []}}", "unknown field `Shemata`"),
        ("Classes: {a/b: {}}", "class 'a/b': resctrl groups cannot have this name"),
        ("Classes: {info: {}}", "class 'info'"),
        ("Classes: [", "while parsing"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    with pytest.raises(WrongState) as caught:
        classes.read(str(path))
    assert str(path) in str(caught.value) and why in str(caught.value)
