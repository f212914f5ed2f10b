"""Attacks on `pyrunc-cri`, run by root, through folders that other users may write to, and through
files that a container changes meanwhile.

Classes: CVE-2021-25741 (subPaths), CVE-2018-15664 and CVE-2019-14271 (cp), predictable temporary
names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cni_plugins.install import install
from cri_server.cli.containers import archive, file_copy
from tests.cri.client_verbs import call, ok
from tests.cri.server_harness import IMAGE, Server
from tests.security.attack import Canary

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: sub}}
spec:
  hostNetwork: true
  containers:
    - name: main
      image: {image}
      command: [sleep, "3600"]
      volumeMounts: [{{name: v, mountPath: /all}}, {{name: v, mountPath: /v, subPath: x}}]
  volumes: [{{name: v, hostPath: {{path: {volume}}}}}]
"""


def test_save_does_not_follow_a_link_at_its_temporary_name(
    server: Server, tmp_path: Path, canary: Canary
) -> None:
    """`save -o` writes to a folder of another user, who has placed a link to the canary at a
    temporary name, and a link to a device at the archive's name. The archive becomes a regular
    file, and the canary is untouched."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    # the temporary name of earlier versions
    (folder / ".images.tar.part").symlink_to(canary.path / "passwd")
    (folder / "images.tar").symlink_to("/dev/null")
    ok(server, "save", "-o", str(folder / "images.tar"), IMAGE)
    assert (folder / "images.tar").lstat().st_size > 100_000
    assert sorted(os.listdir(folder)) == [".images.tar.part", "images.tar"]


def test_installing_plugins_does_not_follow_a_link_at_a_temporary_name(
    tmp_path: Path, canary: Canary
) -> None:
    """`python -m cni_plugins.install` writes to a folder of another user, who has placed a link to
    the canary at a temporary name. The plugins are installed, and the canary is untouched."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / f"bridge.{os.getpid()}.tmp").symlink_to(canary.path / "passwd")
    written = install(str(folder))
    assert all(
        os.stat(path).st_mode & 0o777 == 0o755 and not os.path.islink(path) for path in written
    )


def test_a_restart_follows_no_link_of_the_container(
    server: Server, tmp_path: Path, canary: Canary
) -> None:
    """CVE-2021-25741 across a restart: the container sees the whole volume, replaces the folder of
    its subPath by a link to the canary or to a missing folder, and is restarted. The restart fails
    with an error that names the mount, and no file behind the link is made or opened."""
    volume, nowhere = tmp_path / "volume", tmp_path / "nowhere"
    volume.mkdir()
    pods = server.folder / "pods"
    manifest = POD.format(image=IMAGE, volume=volume)
    ok(server, "run", "--folder", str(pods), "-", stdin=manifest)
    ok(server, "restart", "-t", "0", "main")
    for target, problem in (
        (canary.path, f"{volume}/x, the source of /v, was replaced by a symbolic link"),
        (nowhere, f"'{volume}/x' is a link that leads nowhere"),
    ):
        container = next(c.id for c in server.containers() if c.state == 1)
        server.output(container, "sh", "-c", f"rmdir /all/x; ln -s {target} /all/x")
        assert problem in call(server, "restart", "-t", "0", "main").error
        assert not any(c.state == 1 for c in server.containers())
        (volume / "x").unlink()
        ok(server, "restart", "-t", "0", "main")
    assert not nowhere.exists()
    ok(server, "rm", "-f", "--folder", str(pods), "sub")


@pytest.mark.parametrize("way", ["a copy", "an archive"])
def test_cp_does_not_open_a_file_that_became_a_device(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like CVE-2018-15664: a file of a container becomes a device node between the lookup and
    open(2). `cp`, which no device cgroup restricts, must not open the node, as this could start the
    machine's watchdog. The error names the file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    # The FIFO stands for the device; inotify would report its open.
    os.mkfifo(folder / "file")
    (tmp_path / "plain").write_text("x")
    plain = os.lstat(tmp_path / "plain")
    number, watched = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), Canary.watch([folder / "file"])
    try:
        with (
            open(tmp_path / "out", "w") as out,
            monkeypatch.context() as changed,
            pytest.raises(OSError, match=r"not a regular file any more.*'file'"),
        ):
            # The lookup still finds a regular file.
            changed.setattr(os, "lstat", lambda *_, **__: plain)
            changed.setattr("sys.stdout", out)
            if way == "a copy":
                file_copy.Copy(lambda _: None, lambda _: None).copy_entry(
                    number, "file", number, "new"
                )
            else:
                archive.write(number, "file")
        assert not Canary.seen(watched)
        assert os.listdir(folder) == ["file"]
    finally:
        os.close(number)
