"""Tests pods whose layers and volumes need mounts for which Linux 6.1 has only the old mount API,
or none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cri_server.images.archives import build
from tests.kube.pods import pod, shell
from tests.vm.kubelet.node import Node
from tests.vm.kubelet.test_confinement import test_user_namespaces_separate_pods  # noqa: F401

LAYERED = "docker.io/library/layered:latest"
LAYERS, SOMEBODY = 12, 1234


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Load an image of many layers, whose user is only in the topmost /etc/passwd."""
    passwd = f"root:x:0:0::/:/bin/sh\nsomebody:x:{SOMEBODY}:{SOMEBODY}::/:/bin/sh\n"
    layers = [build.layer({f"layer{n}": str(n)}) for n in range(1, LAYERS - 1)]
    image = build.image(
        [*build.busybox().layers, *layers, build.layer({"etc/passwd": passwd})],
        {"User": "somebody"},
    )
    archive = tmp_path_factory.mktemp("layered") / "image.tar"
    archive.write_bytes(build.docker_archive({LAYERED: image}))
    subprocess.run(["pyrunc-cri", "image", "load", str(archive)], check=True)
    return LAYERED


def test_the_kernel_is_linux_6_1() -> None:
    assert os.uname().release.startswith("6.1.")


@pytest.mark.parametrize("host_users", [True, False], ids=["plain", "mapped"])
def test_an_image_of_many_layers_is_mounted(
    node: Node, removing: list[str], layered: str, host_users: bool
) -> None:
    removing.append("layered")
    facts = "cat /layer* | tr -d '\\n' >/tmp/facts; exec sleep 3600"
    # The kernel has no new mount API for overlays: the server calls mount(2) with a common parent
    # folder in a temporary mount namespace.
    running = node.run(pod("layered", {**shell(facts), "image": layered}, hostUsers=host_users))
    pid = node.main_pid(running)
    assert (Path(f"/proc/{pid}/root/tmp/facts")).read_text() == "".join(
        map(str, sorted(range(1, LAYERS - 1), key=str))
    )
    first = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
    assert Path(f"/proc/{pid}").stat().st_uid == first + SOMEBODY


@pytest.mark.requirement("6.11")
def test_an_error_says_that_a_volume_in_memory_cannot_be_mapped(
    node: Node, removing: list[str]
) -> None:
    removing.append("in-memory")
    # A tmpfs, like the volumes of kubelet's tokens and secrets: it has no id-mapped mounts before
    # Linux 6.3.
    volume = {"name": "v", "emptyDir": {"medium": "Memory"}}
    container = shell("sleep 3600", volumeMounts=[{"name": "v", "mountPath": "/v"}])
    node.create(pod("in-memory", container, hostUsers=False, volumes=[volume]))
    message = "idmap '/var/lib/kubelet/pods/"
    event = node.until(
        lambda: [e for e in node.events("in-memory") if message in e], "the refusal", "in-memory"
    )
    assert "tmpfs" in event[0] and "Linux 6.3" in event[0]
