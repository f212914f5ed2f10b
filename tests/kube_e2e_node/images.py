"""Makes the images that the node suite's specs use in addition to those of `tests.kube_e2e`, under
the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cri_server.images.archives import build
from cri_server.images.archives.build import BuiltImage, LayerFile
from tests.kube_conformance.images import picture
from tests.kube_e2e import images
from tests.support import busybox, toolchain
from tests.support.images import made_once
from tests.support.registry import archive_images


def archives() -> list[Path]:
    """Return two docker-archives, made once for each version of their content: the images of
    `tests.kube_e2e`, and those of this module."""
    base = images.archive()
    recipe = f"{base.name} {Path(__file__).read_text()}"
    return [base, made_once("e2e-node", recipe, lambda: _additional(archive_images(base)))]


def _additional(base: Mapping[str, BuiltImage]) -> Mapping[str, BuiltImage]:
    agnhost = base[f"{images.E2E}/agnhost:2.63.0"]
    plugin = LayerFile((toolchain.e2e_helpers() / "sample-device-plugin").read_bytes(), 0o755)
    started = {"Entrypoint": ["/sampledeviceplugin", "-alsologtostderr"]}
    return {
        # Behind a login (tests/kube_e2e_node/credential_provider.py).
        "gcr.io/k8s-authenticated-test/agnhost:2.6": agnhost,
        f"{images.E2E}/ipc-utils:1.4": build.busybox(busybox.program()),  # it has ipcs(1)
        f"{images.E2E}/kitten:1.8": picture(agnhost, "kitten"),
        # The version is that of its DaemonSet in test/e2e/testing-manifests.
        f"{images.E2E}/sample-device-plugin:1.7": build.image(
            [build.layer({"sampledeviceplugin": plugin, "tmp": build.directory()})], started
        ),
    }
