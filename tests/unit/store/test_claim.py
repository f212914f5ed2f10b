"""Which directories a server claims, and pods in other directories, which it never touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.store import claim
from cri_server.store.claim import claimed
from pyrunc.errors import Error, WrongState


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a pod that a server of an earlier version has left running: nothing remembers
    where."""
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
        pytest.raises(WrongState, match=f"start with --state {earlier}"),
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
