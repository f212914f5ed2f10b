"""Tests that a checkpoint in CRI-O's form continues in a pod of ours.

CRI-O cannot be built here, so the test converts an archive of ours to CRI-O's form: the same files
by the same names, its JSON, its mounts, and the mode of a root folder that containers/storage
makes. Source: CRI-O internal/lib/checkpoint.go and server/container_create_linux.go (1.36),
containers/common pkg/crutils, checkpointctl lib/metadata.go (1.6).
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.cri.server_harness import IMAGE, Server
from tests.support.oci_archives import oci_archive
from tests.vm.counting import WORKLOAD, checkpoint, config, goes_on, restore, wait_beyond

pytestmark = pytest.mark.timeout(900)

STORAGE = "/run/containers/storage/overlay-containers/0123/userdata"
LOG = "io.kubernetes.cri-o.LogPath"
# The first files of its tar, in the order of the list in its source.
FILES = (
    "stats-dump",
    "dump.log",
    "checkpoint",
    "config.dump",
    "spec.dump",
    "bind.mounts",
    "rootfs-diff.tar",
    "deleted.files",
    LOG,
)
CHECKPOINT_IMAGE = "registry.test/checkpoint/of-crio:1"


@pytest.fixture
def archive(server: Server, tmp_path: Path) -> Path:
    """Return a checkpoint in CRI-O's form."""
    (tmp_path / "containerenv").touch()
    # CRI-O mounts this file.
    mount = api.Mount(container_path="/run/.containerenv", host_path=str(tmp_path / "containerenv"))
    # containers/storage gives the root folder this mode.
    first = server.launch(
        server.run_pod(), config(server, f"chmod 555 /; {WORKLOAD}", mounts=[mount])
    )
    wait_beyond(server, first, 5)
    ours, theirs = checkpoint(server, first, tmp_path / "ours.tar"), tmp_path / "theirs.tar"
    folder = tmp_path / "content"
    folder.mkdir()
    subprocess.run(["tar", "xf", ours, "-C", folder], check=True)
    image = server.status(first).image_id.removeprefix("sha256:")
    _convert(folder, image, Path(server.status(first).log_path))
    with tarfile.open(theirs, "w") as converted:
        for name in FILES:
            converted.add(folder / name, name)
    return theirs


def _convert(folder: Path, image: str, log: Path) -> None:
    """Convert the files of our archive to CRI-O's."""
    _write(folder / "config.dump", _config(_read(folder / "config.dump"), image))
    _write(folder / "spec.dump", _spec(_read(folder / "spec.dump")))
    binds = [
        m
        for m in _read(folder / "bind.mounts")
        if m["destination"] not in ("/dev/shm", "/run/.containerenv")
    ]
    _write(folder / "bind.mounts", [{**m, "source": f"{STORAGE}{m['destination']}"} for m in binds])
    _write(folder / "deleted.files", _read(folder / "deleted.files"))
    (folder / "rootfs-diff.tar").write_bytes(_changes((folder / "rootfs-diff.tar").read_bytes()))
    (folder / LOG).write_bytes(log.read_bytes())


def _config(ours: dict[str, Any], image: str) -> dict[str, Any]:
    return {
        "id": ours["id"],
        "name": "k8s_c_pod1_default_pod1-uid_0",
        "rootfsImage": IMAGE,
        "rootfsImageRef": image,
        "rootfsImageName": IMAGE,
        "runtime": "crun",
        "createdTime": ours["createdTime"],
        "checkpointedTime": ours["checkpointedTime"],
        "restoredTime": "0001-01-01T00:00:00Z",
        "restored": False,
    }


def _spec(ours: dict[str, Any]) -> dict[str, Any]:
    annotations = {
        "io.kubernetes.cri-o.Annotations": json.dumps({"io.kubernetes.container.hash": "1"}),
        "io.kubernetes.cri-o.ContainerType": "container",
        "io.kubernetes.cri-o.ImageName": IMAGE,
        LOG: "/var/log/pods/default_pod1_pod1-uid/c/0.log",
    }
    mounts = [
        {
            "destination": place,
            "type": "bind",
            "source": f"{STORAGE}{place}",
            "options": ["rw", "bind", "nodev", "nosuid", "noexec"],
        }
        for place in (
            "/dev/shm",
            "/etc/resolv.conf",
            "/etc/hostname",
            "/run/.containerenv",
            "/etc/hosts",
        )
    ]
    own = [mount for mount in ours["mounts"] if mount["type"] != "bind"]
    return {**ours, "annotations": annotations, "mounts": [*own, *mounts]}


def _changes(ours: bytes) -> bytes:
    """Return the tar `ours` without the root folder and without folders that the image has, too."""
    theirs = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(ours)) as tar,
        tarfile.open(fileobj=theirs, mode="w") as changes,
    ):
        for member in tar:
            if not member.isdir() or member.name.startswith("data"):
                changes.addfile(member, tar.extractfile(member) if member.isreg() else None)
    return theirs.getvalue()


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2))


@pytest.mark.requirement("4.11.1")
def test_an_archive_of_crio_is_restored(server: Server, archive: Path) -> None:
    container = restore(server, archive, config(server))
    assert server.output(container, "stat", "-c", "%a", "/") == "555\n"
    assert server.output(container, "cat", "/run/.containerenv") == ""
    goes_on(server, container)


def test_an_image_with_a_checkpoint_of_crio_is_restored(server: Server, archive: Path) -> None:
    annotations = {"io.kubernetes.cri-o.annotations.checkpoint.name": "c"}
    image = build.image([archive.read_bytes()])
    server.load_image(oci_archive({CHECKPOINT_IMAGE: image}, annotations=annotations))
    goes_on(server, restore(server, CHECKPOINT_IMAGE, config(server)))
