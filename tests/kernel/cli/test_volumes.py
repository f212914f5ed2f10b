"""Volumes of a manifest on the host: the types of hostPath, and subPaths, which cannot leave their
volume."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.cli.manifest import folders, pod_model, volumes
from cri_server.cli.manifest.read import parse
from pyrunc.errors import Error, NotFound, WrongState

PATHS = {
    "Directory": "folder",
    "DirectoryOrCreate": "folder",
    "File": "file",
    "FileOrCreate": "file",
    "Socket": "socket",
    "CharDevice": "character",
    "BlockDevice": "block",
}


def pod(volume: str, security: str = "{}") -> pod_model.PodManifest:
    """Return a pod with one volume."""
    text = f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{
  containers: [{{name: c, image: i}}], securityContext: {security},
  volumes: [{{name: v, {volume}}}]}}}}
"""
    return parse(text)[0]


def source(volume: Path, sub_path: str) -> str:
    (only,) = pod(f"hostPath: {{path: {volume}}}").spec.volumes
    return volumes.source(only, sub_path, volume)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """Make one of each kind of file that a hostPath's type can name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mknod(tmp_path / "character", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod(tmp_path / "block", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        yield tmp_path


@pytest.mark.parametrize("kind", PATHS)
def test_a_host_path_has_the_kind_of_its_type(host: Path, kind: str) -> None:
    for name in sorted(set(PATHS.values())):
        manifest = pod(f"hostPath: {{path: {host}/{name}, type: {kind}}}")
        if name == PATHS[kind]:
            volumes.prepare(manifest, host)
            continue
        with pytest.raises(
            WrongState, match=rf"spec.volumes\[0\].hostPath: '{host}/{name}' is not a "
        ):
            volumes.prepare(manifest, host)


@pytest.mark.parametrize("kind", PATHS)
def test_a_missing_host_path_is_made_only_by_types_that_create(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "above" / "new"
    manifest = pod(f"hostPath: {{path: {path}, type: {kind}}}")
    before = os.umask(0o077)
    try:
        if kind == "DirectoryOrCreate":
            volumes.prepare(manifest, tmp_path)
            assert [oct(p.stat().st_mode) for p in (path.parent, path)] == ["0o40755", "0o40755"]
            return
        with pytest.raises(Error if kind == "FileOrCreate" else NotFound, match=str(path)):
            volumes.prepare(manifest, tmp_path)
        assert not path.parent.exists()
        if kind == "FileOrCreate":
            path.parent.mkdir()
            volumes.prepare(manifest, tmp_path)
            assert oct(path.stat().st_mode) == "0o100644"
    finally:
        os.umask(before)


def test_a_link_as_host_path_is_followed(host: Path) -> None:
    (host / "link").symlink_to("folder")
    volumes.prepare(pod(f"hostPath: {{path: {host}/link, type: Directory}}"), host)
    assert source(host / "link", "new") == f"{host}/folder/new"


@pytest.mark.parametrize("sub_path", ["outwards/x", "absolute/x", "inner/up", "inner/deeper/x"])
def test_a_sub_path_does_not_leave_its_volume_over_a_link(tmp_path: Path, sub_path: str) -> None:
    volume, other = tmp_path / "volume", tmp_path / "other"
    (volume / "inner").mkdir(parents=True)
    other.mkdir()
    (volume / "outwards").symlink_to("../other")
    (volume / "absolute").symlink_to(other)
    (volume / "inner" / "up").symlink_to("../../other")
    (volume / "inner" / "deeper").symlink_to("../outwards")
    with pytest.raises(
        WrongState,
        match=f"subPath '{sub_path.removesuffix('/x')}.*' leaves its volume through a symbolic"
        " link",
    ):
        source(volume, sub_path)
    assert not list(other.iterdir())


def test_a_sub_path_that_is_a_link_to_nowhere_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(Error, match="ENOENT"):
        source(tmp_path, "nowhere")
    assert not (tmp_path / "missing").exists()


def test_a_missing_sub_path_has_the_mode_of_its_volume(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    (volume / "inner").mkdir(parents=True)
    (volume / "real").mkdir()
    (volume / "inner" / "link").symlink_to("../real")
    volume.chmod(0o2777)
    os.chown(volume, -1, 1234)
    assert source(volume, "inner/link//new/./deep/") == f"{volume}/real/new/deep"
    assert oct((volume / "real" / "new" / "deep").stat().st_mode) == "0o42777"
    assert oct((volume / "real").stat().st_mode) == "0o40755", "what was there stays as it is"
    (volume / "file").touch()
    assert source(volume, "file") == f"{volume}/file"


def test_a_folder_of_the_pod_belongs_to_its_fs_group(tmp_path: Path) -> None:
    volumes.prepare(pod("emptyDir: {}", "{fsGroup: 4321}"), tmp_path)
    status = (tmp_path / "volumes" / "v").stat()
    assert (oct(status.st_mode), status.st_gid) == ("0o42777", 4321)


def test_a_deep_volume_is_deleted(tmp_path: Path) -> None:
    """A volume is deleted although a container has nested its folders three thousand deep."""
    folder = folders.make(tmp_path, "default", "p")
    folders.set_owner(folder, "id")
    place = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=place)
        below = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    # A recursive function would fail at a thousand.
    folders.remove(tmp_path, "id")
    assert not list(tmp_path.iterdir())
