"""Tests which directories a server claims, and that pods in other directories are left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cri_server.store import claim
from cri_server.store.claim import claimed
from pyrunc.errors import Error, WrongState


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state directory of an earlier version's server, which has left a pod running and
    no record of its directories."""
    monkeypatch.setattr(claim, "EARLIER_STATE", tmp_path / "earlier")
    monkeypatch.setattr(claim, "DEFAULT_STATE", str(tmp_path / "default"))
    (tmp_path / "root" / "sandboxes").mkdir(parents=True)
    (tmp_path / "root" / "sandboxes" / "abc.json").write_text("{}")
    (tmp_path / "earlier" / "sandboxes" / "abc").mkdir(parents=True)
    return tmp_path / "earlier"


def test_pods_of_an_earlier_version_are_found_in_their_old_folder(
    tmp_path: Path, earlier: Path
) -> None:
    root, default = tmp_path / "root", tmp_path / "default"
    for _ in range(2):
        with claimed(root, default) as paths:
            assert paths.state == earlier
    with (
        pytest.raises(WrongState, match=f"start the server with --state {earlier}"),
        claimed(root, tmp_path / "own"),
    ):
        pass
    (earlier / "sandboxes" / "abc").rmdir()
    with claimed(root, default) as paths:
        assert paths.state == default


def test_another_servers_pods_in_the_earlier_place_are_left_alone(
    tmp_path: Path, earlier: Path
) -> None:
    with claimed(tmp_path / "other", tmp_path / "default") as paths:
        assert paths.state == tmp_path / "default"


def test_a_claim_of_another_boot_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "boot_id", lambda: "before")
    with claimed(tmp_path / "root", tmp_path / "one") as paths:
        (paths.sandbox_states / "abc").mkdir()
    with pytest.raises(WrongState, match="one"), claimed(tmp_path / "root", tmp_path / "two"):
        pass
    monkeypatch.setattr(claim, "boot_id", lambda: "after")
    with claimed(tmp_path / "root", tmp_path / "two"):
        pass


def test_a_link_to_the_same_directory_is_the_same(tmp_path: Path) -> None:
    with claimed(tmp_path / "root", tmp_path / "state") as paths:
        (paths.sandbox_states / "abc").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    with claimed(tmp_path / "link" / "root", tmp_path / "link" / "state"):
        pass


@pytest.mark.parametrize("name", ["root", "state"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    folders = {
        "root": tmp_path / "root",
        "state": tmp_path / "state",
        name: tmp_path / "file" / "x",
    }
    with (
        pytest.raises(Error, match=f"{folders[name]}.*ENOTDIR"),
        claimed(folders["root"], folders["state"]),
    ):
        pass


@pytest.fixture
def pods(tmp_path: Path) -> tuple[Path, Path]:
    """Return the root and state directory of a server that has left a pod running."""
    root, state = tmp_path / "root", tmp_path / "state"
    with claimed(root, state) as paths:
        (paths.sandbox_states / "abc").mkdir()
        (paths.sandbox_records / "abc.json").write_text("{}")
    return root, state


def test_pods_of_a_newer_format_are_refused_by_the_name_of_their_version(
    pods: tuple[Path, Path],
) -> None:
    for folder in pods:
        file = folder / "server.json"
        own = file.read_text()
        newer = json.dumps({**json.loads(own), "format": claim.FORMAT + 1, "written_by": "9.1.0"})
        file.write_text(newer)
        words = f"{folder} have format {claim.FORMAT + 1} of pyrunc-cri 9.1.0"
        with pytest.raises(WrongState, match=words), claimed(*pods):
            pass
        assert file.read_text() == newer, "nothing was written"
        file.write_text(own)
    with claimed(*pods):
        pass


def test_a_newer_form_of_the_claim_itself_is_refused(pods: tuple[Path, Path]) -> None:
    (pods[1] / "server.json").write_text('{"version": 2}')
    words = f"a newer version of pyrunc-cri has used {pods[1]}: .*version 2"
    with pytest.raises(WrongState, match=words), claimed(*pods):
        pass


def test_a_newer_format_without_pods_is_overwritten(pods: tuple[Path, Path]) -> None:
    root, state = pods
    (state / "sandboxes" / "abc").rmdir()
    (root / "sandboxes" / "abc.json").unlink()
    for folder in pods:
        file = folder / "server.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with claimed(root, state):
        pass
    assert json.loads((root / "server.json").read_text())["format"] == claim.FORMAT


def test_the_version_before_refuses_these_pods(pods: tuple[Path, Path]) -> None:
    record = json.loads((pods[1] / "server.json").read_text())
    # The earlier version refuses a claim whose `root` is not its own, and quotes it in the error.
    # In a trial it changed no file.
    assert os.path.realpath(record["root"]) != os.path.realpath(pods[0])
    assert record["root"] == "a later version of pyrunc-cri (pod format 3)"
    assert record["version"] == 1, "or it would ignore the record"


def test_pods_of_the_version_before_are_found(pods: tuple[Path, Path]) -> None:
    root, state = pods
    for folder, other in ((root, {"state": str(state)}), (state, {"root": str(root)})):
        file = folder / "server.json"
        boot = json.loads(file.read_text())["boot_id"]
        file.write_text(json.dumps({"version": 1, "boot_id": boot, **other}))
    with pytest.raises(WrongState, match=f"belong to {root}"), claimed(root.parent / "two", state):
        pass
    with claimed(root, state):
        pass
