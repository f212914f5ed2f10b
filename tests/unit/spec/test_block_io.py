"""Tests classes of block I/O: the class that a container gets, and the OCI object of a class."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

import pytest

from cri_server.spec import block_io, resource_classes
from pyrunc.errors import InvalidArgument, WrongState

FILE = """\
Classes:
  slow:
    - Weight: 80
    - Devices: [DEVICE, /dev/null, /dev/absent*]
      ThrottleReadBps: 50M
      ThrottleWriteIOPS: 5k
    - Devices: [DEVICE]
      ThrottleReadBps: 1Mi
      Weight: 50
  fast:
    - Weight: 400
"""


def block_devices() -> list[str]:
    names = [f"/dev/{name}" for name in os.listdir("/dev")]
    return [name for name in names if os.path.exists(name) and stat.S_ISBLK(os.stat(name).st_mode)]


def test_a_later_entry_of_a_class_overrides_an_earlier_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        block_io, "_devices", lambda patterns: [(8, 0)] if "DEVICE" in patterns else []
    )
    path = tmp_path / "classes.yaml"
    path.write_text(FILE)
    assert block_io.to_oci(str(path), "slow") == {
        "weight": 80,
        "weightDevice": [{"major": 8, "minor": 0, "weight": 50}],
        "throttleReadBpsDevice": [{"major": 8, "minor": 0, "rate": 1 << 20}],
    }
    assert block_io.to_oci(str(path), "fast") == {"weight": 400}


def test_patterns_name_block_devices_only() -> None:
    devices = block_devices()
    numbers = block_io._devices([*devices, "/dev/null", "/dev/absent*"])
    assert numbers == [(os.major(n := os.stat(d).st_rdev), os.minor(n)) for d in devices]


def test_the_most_specific_annotation_selects_the_class() -> None:
    pod = {
        "blockio.resources.beta.kubernetes.io/pod": "a",
        "blockio.resources.beta.kubernetes.io/container.one": "b",
    }
    own = {"io.kubernetes.cri.blockio-class": "c"}
    find = functools.partial(resource_classes.find, block_io.KIND)
    assert [find(n, pod, {}) for n in ("one", "two")] == ["b", "a"]
    assert find("one", pod, own) == "c" and find("one", {}, {}) == ""
    assert find("one", pod, {"io.kubernetes.cri.blockio-class": ""}) == ""


def test_a_missing_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(FILE)
    with pytest.raises(InvalidArgument, match="block I/O class 'medium' is not in"):
        block_io.to_oci(str(path), "medium")
    with pytest.raises(InvalidArgument, match="no classes are configured"):
        block_io.to_oci("", "slow")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Classes: {a: [{Weight: 5}]}", "weight 5 is not in 10..1000"),
        ("Classes: {a: [{Weihgt: 50}]}", "unknown field `Weihgt`"),
        ("Classes: {a: [{ThrottleReadBps: 1M}]}", "an entry has a limit, but no Devices"),
        ("Classes: {a: [{Devices: [/etc], Weight: 50}]}", "'/etc' is not in /dev"),
        ("Classes: {a: [{Weight: 5x}]}", "'5x' is not a quantity"),
        ("Classes: [", "while parsing"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text(text)
    with pytest.raises(WrongState) as caught:
        block_io.check(str(path))
    assert str(path) in str(caught.value) and why in str(caught.value)
