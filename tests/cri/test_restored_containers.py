"""Tests CreateContainer from a checkpoint's archive, without CRIU: which archives are refused, and
that the refused ones leave nothing behind."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server, code_of, message_of
from tests.cri.without_criu import (
    IMAGES,
    SEPARATE,
    Code,
    archive,
    criu,
    module_server,
    programs,
)
from tests.support import criu_images

__all__ = ["criu", "module_server", "programs"]


def refused(server: Server, reference: str) -> tuple[Code, str]:
    """Assert that CreateContainer fails and leaves no container; return the error's code and
    text."""
    pod = server.run_pod()
    before = sorted(p.name for p in (server.root / "containers").iterdir())
    config = server.container_config(image=api.ImageSpec(image=reference))
    containers = (
        code_of(lambda: server.create(pod, config)),
        message_of(lambda: server.create(pod, config)),
    )
    assert sorted(p.name for p in (server.root / "containers").iterdir()) == before
    assert not list((server.state / "containers").iterdir())
    return containers


@pytest.mark.requirement("4.11.1")
def test_an_archive_is_restored_by_criu_only(server: Server, criu: Path, tmp_path: Path) -> None:
    """CreateContainer restores the archive's files. When CRIU fails, the container has exited with
    the reason StartError."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        member = tarfile.TarInfo("written")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    content = ("rootfs-diff.tar", layer.getvalue()), ("deleted.files", b'["/etc/group"]')
    path = archive(tmp_path / "a.tar", *IMAGES, *content)
    container = server.create(
        server.run_pod(), server.container_config(image=api.ImageSpec(image=path))
    )
    upper = server.root / "containers" / container / "upper"
    assert (upper / "written").read_bytes() == b"data" and (upper / "etc/group").is_char_device()
    assert server.status(container).image.image == IMAGE
    assert "criu" in message_of(lambda: server.start_container(container))
    status = server.status(container)
    assert (status.state, status.exit_code, status.reason) == (
        api.CONTAINER_EXITED,
        128,
        "StartError",
    )


def test_a_layer_in_the_form_of_containerd_is_restored(
    server: Server, criu: Path, tmp_path: Path
) -> None:
    """The archive's layer may be compressed and have whiteouts in place of deleted.files."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w:gz") as tar:
        for name, content in (("written", b"data"), ("etc/.wh.group", b"")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path = archive(tmp_path / "a.tar", *IMAGES, ("rootfs-diff.tar", layer.getvalue()))
    container = server.create(
        server.run_pod(), server.container_config(image=api.ImageSpec(image=path))
    )
    upper = server.root / "containers" / container / "upper"
    assert (upper / "written").read_bytes() == b"data" and (upper / "etc/group").is_char_device()


def test_archives_of_other_engines_are_restored(server: Server, criu: Path, tmp_path: Path) -> None:
    """The root folder has the mode from the archive, and mounts of the archive that are not in the
    request have placeholders."""
    places = ("/run/.containerenv", "/run/secrets")
    binds = [
        {"destination": place, "type": "bind", "source": "/nowhere", "options": ["bind"]}
        for place in places
    ]
    members = (
        ("spec.dump", json.dumps({"mounts": binds, "linux": SEPARATE}).encode()),
        ("checkpoint/files.img", criu_images.files({"/": stat.S_IFDIR | 0o555})),
    )
    path = archive(tmp_path / "a.tar", *IMAGES, *members)
    config = server.container_config(image=api.ImageSpec(image=path))
    folder = server.root / "containers" / server.create(server.run_pod(), config)
    assert stat.S_IMODE((folder / "upper").stat().st_mode) == 0o555
    assert (folder / "placeholders/0").read_bytes() == b"" and list(
        (folder / "placeholders/1").iterdir()
    ) == []
    (tmp_path / "own").touch()
    config.mounts.add(container_path=places[0], host_path=str(tmp_path / "own"))
    folder = server.root / "containers" / server.create(server.run_pod(), config)
    # the request's mount replaces the archive's
    assert [p.is_dir() for p in (folder / "placeholders").iterdir()] == [True]


def test_an_image_id_is_not_pulled(server: Server, criu: Path, tmp_path: Path) -> None:
    # An image id of CRI-O has no `sha256:`, so it has the form of a name on Docker Hub.
    config = {"rootfsImageRef": "0123456789abcdef" * 4, "rootfsImageName": ""}
    code, message = refused(server, archive(tmp_path / "a.tar", *IMAGES, **config))
    assert code == Code.NOT_FOUND and "the image of the checkpoint is not on this node" in message


def test_files_that_are_no_archive_are_refused(server: Server, criu: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tar")
    for reference, code, why in (
        (str(tmp_path / "missing"), Code.NOT_FOUND, "does not exist on this node"),
        (str(tmp_path), Code.INVALID_ARGUMENT, "is not a regular file"),
        ("/dev/null", Code.INVALID_ARGUMENT, "is not a regular file"),
        (str(tmp_path / "text"), Code.INVALID_ARGUMENT, "the checkpoint's archive"),
        (archive(tmp_path / "empty.tar"), Code.INVALID_ARGUMENT, "has no folder checkpoint"),
        (
            archive(tmp_path / "image.tar", *IMAGES, rootfsImageName="registry.test/none:1"),
            None,
            "",
        ),
    ):
        actual_code, message = refused(server, reference)
        assert (code is None or actual_code == code) and why in message, (
            reference,
            actual_code,
            message,
        )


@pytest.mark.parametrize(
    "members",
    [
        [("checkpoint", "/etc")],
        [("checkpoint", None), ("checkpoint/pages-1.img", "/etc/shadow")],
        [*IMAGES, ("config.dump", "/etc/passwd")],
        [*IMAGES, ("rootfs-diff.tar", "/etc/passwd")],
        [*IMAGES, ("../escaped", b"x")],
        [*IMAGES, ("deleted.files", b'["../../escaped"]')],
        [*IMAGES, ("rootfs-diff.tar", b"no tar at all" * 100)],
        [*IMAGES, ("checkpoint/below", None)],
        [*IMAGES, ("checkpoint/files.img", b"no image")],
    ],
    ids=["folder", "image", "config", "layer", "escape", "removal", "no-tar", "folders", "files"],
)
def test_a_hostile_archive_is_refused(
    server: Server, criu: Path, tmp_path: Path, members: list[tuple[str, bytes | str | None]]
) -> None:
    code, message = refused(server, archive(tmp_path / "a.tar", *members))
    assert code == Code.INVALID_ARGUMENT and "checkpoint" in message, message
    # os.walk skips files that the trash deletes meanwhile.
    assert not [path for path, _, names in os.walk(server.root) if "escaped" in names]
    assert not (tmp_path.parent / "escaped").exists()


def test_a_request_that_does_not_fit_the_archive_is_refused(
    server: Server, criu: Path, tmp_path: Path
) -> None:
    spec = {"mounts": [{"destination": "/data", "type": "bind", "source": "/etc"}]}
    code, message = refused(
        server,
        archive(
            tmp_path / "a.tar",
            *IMAGES,
            ("spec.dump", json.dumps({**spec, "linux": SEPARATE}).encode()),
        ),
    )
    assert code == Code.INVALID_ARGUMENT and "had host mounts at /data" in message


def test_without_criu_nothing_is_created(server: Server, tmp_path: Path) -> None:
    code, message = refused(server, archive(tmp_path / "a.tar", *IMAGES))
    assert code == Code.FAILED_PRECONDITION and "criu is not in $PATH" in message
