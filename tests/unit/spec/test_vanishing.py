"""Tests folders that other programs change while they are read: vanished entries are skipped, the
others are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cri_server.network import configuration
from cri_server.spec import sources


@pytest.fixture
def taken_after_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function: the file that it gets is removed as soon as the file's folder has been
    listed."""
    listdir, scandir = os.listdir, os.scandir

    def take(path: Path) -> None:
        def old_list(folder: str) -> list[str]:
            names = listdir(folder)
            if Path(folder) == path.parent:
                path.unlink(missing_ok=True)
            return names

        def old_entries(folder: str) -> list[os.DirEntry[str]]:
            with scandir(folder) as entries:
                listing = sorted(entries, key=lambda entry: entry.name)
            if Path(folder) == path.parent:
                path.unlink(missing_ok=True)
            return listing

        monkeypatch.setattr(os, "listdir", old_list)
        monkeypatch.setattr(os, "scandir", old_entries)

    return take


def test_a_device_may_vanish_while_its_folder_is_listed(
    tmp_path: Path, taken_after_listing: Callable[[Path], None]
) -> None:
    for name in ("a", "b"):
        os.mknod(tmp_path / name, 0o20666, os.makedev(1, 3))
    taken_after_listing(tmp_path / "a")
    assert [node.path for node in sources._nodes(str(tmp_path), "/dev")] == ["/dev/b"]


def test_a_network_configuration_may_vanish_while_it_is_read(
    tmp_path: Path, taken_after_listing: Callable[[Path], None]
) -> None:
    """When an installer removes a file during the reading, the next file is used, not the built-in
    network."""
    for name in ("10-old", "20-new"):
        content = {"cniVersion": "1.0.0", "name": name, "plugins": [{"type": "bridge"}]}
        (tmp_path / f"{name}.conflist").write_text(json.dumps(content))
    builtin = configuration.builtin_network(str(tmp_path / "leases"))
    current = configuration.Configuration(str(tmp_path), default=builtin)
    taken_after_listing(tmp_path / "10-old.conflist")
    assert current.current().source.endswith("20-new.conflist")
