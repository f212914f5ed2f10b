"""Runs Kubernetes' node suite, `e2e_node.test`, on a node of ours: the suite brings etcd, an API
server and its own kubelet.

That kubelet keeps its files at fixed paths below /var/lib and /var/log. In the node's mount
namespace, these paths are folders of the test.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.kube_e2e_node import credential_provider, systemd_stand_in
from tests.support import ginkgo, toolchain
from tests.support.cluster_node import (
    LOCKED_REGISTRY,
    POD_SUBNETS,
    REGISTRY,
    Node,
    bridge_network,
)
from tests.support.processes import Program, wait_until

REPOSITORY = Path(__file__).parents[2]
# The registries with the images of these hosts; one of them demands a login.
IMAGE_HOSTS = {
    "docker.io": REGISTRY,
    "registry.k8s.io": REGISTRY,
    credential_provider.HOST: LOCKED_REGISTRY,
}
LOGIN = f"{credential_provider.USER}:{credential_provider.PASSWORD}"
# Folders that kubelet and the mounts of its specs expect at these places.
FIXED_FOLDERS = (
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
    "/run/cdi",
)
# A hybrid host has no controllers in its v2 tree, so kubelet makes no groups for pods there.
KUBELET = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "failSwapOn": False,
    "failCgroupV1": False,
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": ["none"],
    "cgroupDriver": "cgroupfs",
    "makeIPTablesUtilChains": False,
    "podCIDR": POD_SUBNETS[0],
    "serializeImagePulls": False,
    "volumeStatsAggPeriod": "10s",
    "fileCheckFrequency": "10s",
    "evictionPressureTransitionPeriod": "30s",
    "evictionHard": {
        "imagefs.available": "1%",
        "nodefs.available": "1%",
        "memory.available": "50Mi",
    },
    # kubelet collects no images, however full the disk of this machine is.
    "imageGCHighThresholdPercent": 100,
}


class SuiteNode(Node):
    """A node with our server and two registries, without a kubelet. At `FIXED_FOLDERS` its mount
    namespace has folders of the test."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.pods_group = f"/{name}"
        self.registry = Program("registry", folder / "log")
        self.locked_registry = Program("locked-registry", folder / "log")
        self.units = folder / "units"
        self.log = folder / "ginkgo.log"

    def up(self, images: Sequence[Path]) -> None:
        """Start the registries with the archives `images`, and the server; all answer on return."""
        self.make_network()
        self._make_mounts()
        self._serve_images(self.registry, REGISTRY, images)
        self._serve_images(self.locked_registry, LOCKED_REGISTRY, images, "--auth", LOGIN)
        self.write_configuration(bridge_network(self.folder / "leases"))
        self._mirror_image_hosts()
        self.start_server()

    def down(self) -> None:
        """End kubelet, pods, server and registries; only files remain."""
        self._systemctl("stop", *self._systemctl("list-units").split())
        self.stop()
        self.registry.stop()
        self.locked_registry.stop()

    def environment(self) -> dict[str, str]:
        """Return the suite's environment, whose PATH begins with the stand-ins for systemd."""
        programs = self.folder / "stand-ins"
        programs.mkdir(parents=True, exist_ok=True)
        self.units.mkdir(exist_ok=True)
        for name in systemd_stand_in.PROGRAMS:
            script = programs / name
            script.write_text(f"#!{sys.executable}\n" + Path(systemd_stand_in.__file__).read_text())
            script.chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "KUBE_E2E_NODE_UNITS": str(self.units)}

    def _systemctl(self, *words: str) -> str:
        command = [str(self.folder / "stand-ins/systemctl"), *words]
        environment = self.environment()
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    def _make_mounts(self) -> None:
        """Start a process that holds a mount namespace of the node open."""
        ready = self.folder / "mounted"
        binds = []
        for number, place in enumerate(FIXED_FOLDERS):
            own = self.folder / "fixed" / str(number)
            own.mkdir(parents=True)
            Path(place).mkdir(parents=True, exist_ok=True)
            binds.append(f"mount --bind {shlex.quote(str(own))} {place}")
        steps = ["mount --make-rshared /", *binds, f"echo > {ready}", "exec sleep infinity"]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", " && ".join(steps)]
        self.mounts.start(command)
        if not wait_until(ready.exists, 10):
            raise RuntimeError(f"no mount namespace: {self.mounts.tail()}")

    def _serve_images(
        self, registry: Program, address: str, images: Sequence[Path], *options: str
    ) -> None:
        host, _, port = address.rpartition(":")
        module = [sys.executable, "-m", "tests.support.registry"]
        place = ["--address", host, "--port", port, "--root", f"{self.folder}/{registry.name}"]
        registry.start(
            self.inside(*module, *place, *options, *map(str, images)),
            environment={"PYTHONPATH": str(REPOSITORY)},
        )

    def _mirror_image_hosts(self) -> None:
        for host, registry in IMAGE_HOSTS.items():
            hosts = self.folder / "certs.d" / host / "hosts.toml"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f'server = "http://{registry}"\n')

    def run(
        self, focus: str, skip: Sequence[str], timeout_s: int, processes: int = 1, *options: str
    ) -> list[ginkgo.Spec]:
        """Run the specs that match `focus` and no pattern of `skip`; return ginkgo's reports of
        them."""
        reports = self.folder / "reports"
        reports.mkdir(exist_ok=True)
        (reports / "report.json").unlink(missing_ok=True)
        configuration = self.folder / "kubelet.yaml"
        configuration.write_text(json.dumps(KUBELET))
        # The suite writes its files beside its program.
        program = self.folder / "e2e_node.test"
        program.unlink(missing_ok=True)
        program.symlink_to(toolchain.e2e_node())
        skipped = [f"--skip={pattern}" for pattern in skip]
        credentials = credential_provider.install(self.folder / "credentials")
        kubelet_flags = [f"--node-ip={self.address}", *credentials]
        command = [
            str(toolchain.e2e_helpers() / "ginkgo"),
            f"--procs={processes}",
            f"--timeout={timeout_s}s",
            "--no-color",
            f"--focus={focus}",
            *skipped,
            "--json-report=report.json",
            f"--output-dir={reports}",
            str(program),
            "--",
            f"--k8s-bin-dir={toolchain.kubernetes()}",
            f"--report-dir={reports}",
            "--node-name=node1",
            f"--container-runtime-endpoint=unix://{self.socket}",
            "--prepull-images=false",
            f"--kubelet-config-file={configuration}",
            *(f"--kubelet-flags={flag}" for flag in kubelet_flags),
            *options,
        ]
        ginkgo.run(self.inside(*command), self.log, timeout_s + 120, self.environment())
        return ginkgo.specs(reports / "report.json")
