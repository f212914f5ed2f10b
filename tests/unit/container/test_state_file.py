"""Tests reading and writing state.json, which shims and other versions also read and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyrunc.atomic_file import DamagedRecord
from pyrunc.container import state as states
from pyrunc.container.state import State

# As it was written before it was a record, by a shim.
EARLIER = {
    "version": 1,
    "id": "c",
    "bundle": "/b",
    "rootfs": "",
    "oci_version": "1.2.0",
    "annotations": {"a": "b"},
    "created": "2026-01-01T00:00:00.000000000Z",
    "owner_uid": 0,
    "pid": 12,
    "start_time": 34,
    "private_pids": True,
    "cgroup": {"path": "/c", "driver": "cgroupfs"},
    "complete": True,
    "keyring": "_ses.c",
    "started_at_ns": 56,
}


def write(root: Path, **changes: object) -> None:
    (root / "c").mkdir(exist_ok=True)
    (root / "c" / "state.json").write_text(json.dumps(EARLIER | changes))


def test_the_previous_version_and_this_one_read_each_others_state(tmp_path: Path) -> None:
    write(tmp_path)
    record = State.read(tmp_path / "c")
    assert {"version": 1, **record.to_fields()} == EARLIER
    state = states.find(str(tmp_path), "c")
    assert (state.pid, state.start_time, state.keyring, state.complete) == (12, 34, "_ses.c", True)
    state.save()
    again = json.loads((tmp_path / "c" / "state.json").read_text())
    assert again == EARLIER


def test_the_streams_of_a_container_are_kept(tmp_path: Path) -> None:
    write(tmp_path)
    assert states.find(str(tmp_path), "c").streams is None
    write(tmp_path, streams=["", "pipe:[1]", "file[2:3]"])
    assert states.find(str(tmp_path), "c").streams == ["", "pipe:[1]", "file[2:3]"]


def test_the_state_of_a_create_that_was_killed_has_no_process(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    State("c", str(tmp_path / "c")).save()
    state = states.find(str(tmp_path), "c")
    assert (state.pid, state.cgroup, state.annotations, state.complete) == (0, None, None, False)


def test_a_damaged_state_is_refused_with_the_field(tmp_path: Path) -> None:
    write(tmp_path, pid="twelve")
    with pytest.raises(DamagedRecord, match=r"state\.json: pid is 'twelve', not a whole number"):
        states.find(str(tmp_path), "c")
    write(tmp_path, colour="green")
    assert states.find(str(tmp_path), "c").pid == 12
