"""Tests skopeo and umoci: both read the image store, and the server loads archives of skopeo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cri_server.images.archives.build import LayerFile, image, layer
from cri_server.images.service import ImageService
from tests.cri.images.trees import names, snapshot
from tests.support.registry import Registry

BUILT = image(
    [
        layer({"a": "1", "d/b": "2"}),
        layer({"d/.wh.b": ""}),
        layer({"c": LayerFile(b"3", 0o4755, uid=7)}),
    ],
    {"Cmd": ["/c"]},
)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


async def test_skopeo_and_umoci_read_our_layout(
    tmp_path: Path, registry: Registry, service: ImageService
) -> None:
    registry.push("team/app:v1", BUILT)
    name = f"{registry.host}/team/app:v1"
    await service.pull(name)
    layout = f"{tmp_path}/images:{name}"
    assert len(json.loads(run("skopeo", "inspect", f"oci:{layout}"))["Layers"]) == 3
    run("skopeo", "--insecure-policy", "copy", "-q", f"oci:{layout}", f"dir:{tmp_path}/copied")
    assert run("umoci", "ls", "--layout", f"{tmp_path}/images").split() == [name]
    run("umoci", "unpack", "--image", layout, f"{tmp_path}/bundle")
    theirs = snapshot(tmp_path / "bundle/rootfs", times=False)
    assert names(tmp_path / "bundle/rootfs") == {"a", "c", "d"}
    [top, _, bottom] = (await service.rootfs(BUILT.id)).lower_dirs
    assert theirs[b"c"] == snapshot(top, times=False)[b"c"]
    assert theirs[b"a"] == snapshot(bottom, times=False)[b"a"]


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
async def test_archives_of_skopeo_are_loaded(
    tmp_path: Path, registry: Registry, service: ImageService, kind: str
) -> None:
    registry.push("team/app:v1", BUILT)
    source = f"docker://{registry.host}/team/app:v1"
    target = f"{kind}:{tmp_path}/archive.tar:docker.io/team/app:v2"
    run("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false", source, target)
    [loaded] = await service.load(tmp_path / "archive.tar")
    assert (loaded.id, loaded.repo_tags) == (BUILT.id, ["docker.io/team/app:v2"])
    assert len((await service.rootfs(BUILT.id)).lower_dirs) == 3


async def test_skopeo_accepts_the_registry_of_the_tests(registry: Registry) -> None:
    digest = registry.push("team/app:v1", BUILT)
    inspected = json.loads(
        run("skopeo", "inspect", "--tls-verify=false", f"docker://{registry.host}/team/app:v1")
    )
    assert (inspected["Digest"], inspected["RepoTags"]) == (digest, ["v1"])
