"""Tests which executables of the plugin folder start as NRI plugins, in which order, and with which
configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.nri import launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir(mode=0o755)
    for name in ("20-b", "10-a", "9-c", "noindex", "1x-d", "30-"):
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    (folder / "40-text").write_text("")
    (folder / "50-folder").mkdir()
    return folder


def plugins_in(folder: Path) -> list[tuple[str, str, str]]:
    return [(p.index, p.name, p.config) for p in launch.find(folder, folder.parent / "conf")]


def test_programs_start_by_index_with_their_configuration(folder: Path) -> None:
    conf = folder.parent / "conf"
    conf.mkdir()
    (conf / "a.conf").write_text("less")
    (conf / "10-a.conf").write_text("more")
    (conf / "b.conf").write_text("by name")
    assert plugins_in(folder) == [("10", "a", "more"), ("20", "b", "by name")]


def test_a_missing_folder_has_no_plugins(tmp_path: Path) -> None:
    assert plugins_in(tmp_path / "missing") == []


def test_programs_that_others_can_write_are_skipped(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "20-b").chmod(0o757)
    assert plugins_in(folder) == [("10", "a", "")]
    assert "20-b is not started: users other than root can write to it" in caplog.text
    folder.chmod(0o777)
    assert plugins_in(folder) == []
    assert "no plugin is started" in caplog.text
