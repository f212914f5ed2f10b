"""Tests pull secrets, and the collection of unused images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from cri_server.images.archives import build
from tests.kube.pods import Kube, pod
from tests.support import cri
from tests.support.cluster import LOCKED_REGISTRY, PASSWORD, USER


def test_a_pull_secret_opens_a_registry_with_a_password(kube: Kube) -> None:
    image = {
        "image": f"{LOCKED_REGISTRY}/library/busybox:latest",
        "imagePullPolicy": "Always",
        "command": ["sleep", "3600"],
    }
    kube.apply(pod("refused", image))
    kube.until(
        lambda: any(
            "ErrImagePull" in e or "401" in e or "authoriz" in e.lower() for e in kube.events()
        ),
        "the refusal",
    )
    kube(
        "create",
        "secret",
        "docker-registry",
        "login",
        f"--docker-server={LOCKED_REGISTRY}",
        f"--docker-username={USER}",
        f"--docker-password={PASSWORD}",
    )
    allowed = kube.run(pod("allowed", image, imagePullSecrets=[{"name": "login"}]))
    status = allowed["status"]["containerStatuses"][0]
    assert status["image"] == image["image"], (
        "the status must name this registry, not docker.io, which has the same image"
    )
    assert status["imageID"].startswith(f"{LOCKED_REGISTRY}/library/busybox@sha256:")
    kube.apply(pod("later", {**image, "imagePullPolicy": "IfNotPresent"}))
    kube.until(
        lambda: any("later" in line and "ImagePull" in line for line in pods_and_reasons(kube)),
        "the refusal of a stored image, by KubeletEnsureSecretPulledImages",
    )
    assert all(PASSWORD not in e for e in kube.events())
    assert PASSWORD not in kube.cluster.node.server.tail(10_000)


def pods_and_reasons(kube: Kube) -> list[str]:
    """Return the name of each pod with the reasons for which its containers wait."""
    pods = []
    for each in json.loads(kube("get", "pods", "-o", "json").stdout)["items"]:
        states = [status["state"] for status in each["status"].get("containerStatuses", [])]
        reasons = [state["waiting"].get("reason", "") for state in states if "waiting" in state]
        pods.append(" ".join([each["metadata"]["name"], *reasons]))
    return pods


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_unused_images_are_collected(kube: Kube, tmp_path: Path) -> None:
    unused = "unused.example/thing:1"
    archive = tmp_path / "unused.tar"
    archive.write_bytes(
        build.docker_archive({unused: build.image([build.layer({"file": "content"})])})
    )
    kube.cluster.node.load(archive)
    kube.run(pod("p"))
    with cri.connect(kube.cluster.node.socket) as client:

        def tags() -> set[str]:
            return {
                tag
                for image in client.image.ListImages(api.ListImagesRequest()).images
                for tag in image.repo_tags
            }

        assert {unused, "docker.io/library/busybox:latest"} <= tags()
        # With these limits the disk counts as too full.
        kube.cluster.restart_kubelet(
            imageGCHighThresholdPercent=2, imageGCLowThresholdPercent=1, imageMinimumGCAge="0s"
        )
        try:
            # kubelet checks the disk every five minutes.
            kube.until(lambda: unused not in tags(), "the removal of the unused image", 400)
            assert "docker.io/library/busybox:latest" in tags()
        finally:
            kube.cluster.restart_kubelet()
    assert kube.get("p")["status"]["containerStatuses"][0]["restartCount"] == 0
