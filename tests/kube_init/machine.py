"""A machine for `kubeadm init`. It has no systemd, so kubelet is started here as the unit of
Kubernetes' packages would start it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from tests.support import control_plane_images, images, session, toolchain
from tests.support.kubectl import Kubectl
from tests.support.machine import Machine
from tests.support.processes import wait_until

WRITTEN = ("/etc", "/opt", "/usr/libexec", "/var/lib")
PATIENCE_S = 240.0
# Settings that a hybrid host needs of kubelet, and a network namespace of kube-proxy; kubeadm sets
# the rest.
KUBELET = {
    "kind": "KubeletConfiguration",
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": ["none"],
    "failCgroupV1": False,
    "failSwapOn": False,
    "evictionHard": {
        "imagefs.available": "1%",
        "nodefs.available": "1%",
        "memory.available": "50Mi",
    },
    # kubelet collects no images, however full the disk of this machine is.
    "imageGCHighThresholdPercent": 100,
}
PROXY = {
    "kind": "KubeProxyConfiguration", "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
    "mode": "nftables", "conntrack": {"maxPerCore": 0, "min": 0},
}  # fmt: skip


class KubeadmMachine(Machine, Kubectl):
    """A machine for `kubeadm init`, to whose cluster `kubectl` connects from outside."""

    def __init__(self, folder: Path) -> None:
        self._programs = toolchain.kubernetes()
        super().__init__(folder, session.name("init"), WRITTEN, [self._programs])
        self.kubeconfig = self.written("/etc") / "kubernetes/admin.conf"

    def up(self) -> None:
        """Make the namespaces, start the server, and load the images that it would pull from a
        registry."""
        toolchain.kubeadm()
        archives = [control_plane_images.archive(), images.busybox()]
        self.begin()
        # The machine's file may name a resolver on its loopback, which CoreDNS would take for
        # itself.
        self.types("rm -f /etc/resolv.conf; echo nameserver 198.18.77.254 >/etc/resolv.conf")
        self.serve(archives)

    def kubeadm_file(self) -> Path:
        """Write kubeadm's configuration with the server's socket, as in docs/install.md; return its
        path."""
        registration = {
            "criSocket": f"unix://{self.node.socket}",
            "name": self.node.host,
            "taints": [],
        }
        init = {
            "nodeRegistration": {
                **registration,
                "kubeletExtraArgs": [{"name": "node-ip", "value": self.node.address}],
            },
            "localAPIEndpoint": {"advertiseAddress": self.node.address},
        }
        logs = {"podLogsDir": str(self.node.folder / "pod-logs")}
        api = {"apiVersion": "kubeadm.k8s.io/v1beta4"}
        parts: list[dict[str, Any]] = [
            {**api, "kind": "InitConfiguration", **init},
            {**api, "kind": "ClusterConfiguration", "kubernetesVersion": toolchain.KUBERNETES},
            {**KUBELET, **logs},
            PROXY,
        ]
        file = self.folder / "kubeadm.yaml"
        file.write_text("---\n".join(json.dumps(part) + "\n" for part in parts))
        return file

    def init(self, command: str) -> str:
        """Run `kubeadm init`, start kubelet as soon as kubeadm has written its configuration, and
        return kubeadm's output."""
        words = [*shlex.split(command), "--ignore-preflight-errors=all"]
        with open(self.folder / "kubeadm.log", "w+") as log:
            running = subprocess.Popen(
                self.inside(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                folder = self.written("/var/lib") / "kubelet"
                configured = folder / "config.yaml"
                wait_until(lambda: configured.exists() or running.poll() is not None, PATIENCE_S)
                if configured.exists():
                    self._start_kubelet((folder / "kubeadm-flags.env").read_text())
                running.wait(PATIENCE_S)
            finally:
                running.kill()
                running.wait()
            log.seek(0)
            output = log.read()
        assert running.returncode == 0, (
            f"{output}\n{self.node.kubelet.tail(60)}\n{self.node.server.tail(20)}"
        )
        return output

    def _start_kubelet(self, flags: str) -> None:
        """Start kubelet like the drop-in of kubeadm's package. `flags`: the text of
        /var/lib/kubelet/kubeadm-flags.env."""
        match = re.search(r'KUBELET_KUBEADM_ARGS="(.*)"', flags)
        assert match, flags
        own = (
            "--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf"
            " --kubeconfig=/etc/kubernetes/kubelet.conf --config=/var/lib/kubelet/config.yaml"
        )
        self.node.kubelet.start(
            self.node.inside(str(self._programs / "kubelet"), *own.split(), *shlex.split(match[1]))
        )

    def pods(self, *options: str) -> list[dict[str, Any]]:
        """Return the pods; an empty list while the API server does not answer."""
        done = self.kubectl("get", "pods", "-o", "json", *options, check=False)
        return list(json.loads(done.stdout)["items"]) if not done.returncode else []

    def until_ready(self, names: set[str], *options: str) -> None:
        """Wait until there is a pod for each beginning of a name in `names`, and all pods are
        Ready."""

        def ready() -> bool:
            pods = self.pods(*options)
            present = {
                name for name in names for pod in pods if pod["metadata"]["name"].startswith(name)
            }
            return present == names and all(has_become_ready(pod) for pod in pods)

        if not wait_until(ready, PATIENCE_S, 1):
            seen = self.kubectl("get", "pods,events", "-A", check=False).stdout + self.cri(
                "ps", "-a"
            )
            raise AssertionError(f"not ready: {sorted(names)}\n{seen}\n{self.node.kubelet.tail()}")

    def down(self) -> None:
        """End everything; only files remain."""
        self.node.kubelet.stop()
        self.node.stop()


def has_become_ready(pod: dict[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"
