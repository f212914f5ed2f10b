"""Tests kubelet's checkpoint API with the real CRIU: an archive of a running container, and a pod
that continues from an image of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from cri_server.images.archives import build
from tests.kube.pods import pod, shell
from tests.support.oci_archives import oci_archive
from tests.support.processes import installed
from tests.vm.kubelet.node import NAMESPACE, Node

SCRIPT = "i=0; while :; do i=$((i+1)); echo $i > /next; mv /next /count; sleep 0.2; done"
IMAGE = "registry.test/checkpoint:1"
DROP_IN = Path("/etc/pyrunc/config.toml.d/50-restore.toml")


def count(node: Node, name: str) -> int:
    """Return the last number that the pod has counted."""
    try:
        return int(Path(f"/proc/{node.main_pid(node.pod(name))}/root/count").read_text())
    except FileNotFoundError:
        return 0


def reload() -> None:
    done = subprocess.run(
        ["systemctl", "show", "-P", "MainPID", "pyrunc-cri"],
        capture_output=True,
        text=True,
        check=True,
    )
    os.kill(int(done.stdout), signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_pod_continues_in_another_pod(node: Node, tmp_path: Path) -> None:
    try:
        node.run(pod("before", shell(SCRIPT)))
        node.until(lambda: count(node, "before") > 10, "the pod's numbers")
        (archive,) = json.loads(node.api.kubelet("POST", f"/checkpoint/{NAMESPACE}/before/c"))[
            "items"
        ]
        with tarfile.open(archive) as tar:
            assert {
                "config.dump",
                "spec.dump",
                "rootfs-diff.tar",
                "checkpoint/inventory.img",
            } <= set(tar.getnames())
        at_dump = count(node, "before")
        node.until(lambda: count(node, "before") > at_dump, "the pod's further numbers")
        image = build.image([Path(archive).read_bytes()])
        annotations = {"org.criu.checkpoint.container.name": "c"}
        (tmp_path / "image.tar").write_bytes(oci_archive({IMAGE: image}, annotations=annotations))
        load = [
            *installed("pyrunc-cri"),
            "--address",
            f"unix://{node.socket}",
            "load",
            "-i",
            str(tmp_path / "image.tar"),
        ]
        subprocess.run(load, check=True)
        DROP_IN.parent.mkdir(exist_ok=True)
        DROP_IN.write_text("[containers]\nrestore_images = true\n")
        reload()
        node.run(pod("after", {**shell(SCRIPT), "image": IMAGE, "imagePullPolicy": "Never"}))
        node.until(lambda: count(node, "after") > at_dump, "the numbers of the pod that goes on")
        os.unlink(archive)
    finally:
        DROP_IN.unlink(missing_ok=True)
        reload()
        node.remove("before", "after")
