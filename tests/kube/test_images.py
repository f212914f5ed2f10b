"""Pull secrets, and collection of images that nobody uses."""

from __future__ import annotations

from tests.kube.pods import Kube, pod
from tests.support.cluster import LOCKED_REGISTRY, PASSWORD, USER


def test_a_registry_that_demands_a_password(kube: Kube) -> None:
    image = {
        "image": f"{LOCKED_REGISTRY}/library/busybox:latest",
        "imagePullPolicy": "Always",
        "command": ["sleep", "3600"],
    }
    kube.apply(pod("refused", image))
    kube.until(
        lambda: any("ErrImagePull" in e or "401" in e or "authoriz" in e.lower() for e in kube.events()),
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
    kube.run(pod("allowed", image, imagePullSecrets=[{"name": "login"}]))
    assert all(PASSWORD not in e for e in kube.events())
    assert PASSWORD not in kube.cluster.node.server.tail(10_000)
