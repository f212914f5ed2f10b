"""Prepares a cluster for `kubeadm join`: phases of `kubeadm init` in the API server, and
Kubernetes' packages on a guest that becomes a node."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.support import toolchain
from tests.support.authority import Authority
from tests.support.guest import SERVICES, Guest
from tests.support.guest_control import GuestControlPlane

PORT = 6443
# The files of the packages kubelet and kubeadm of pkgs.k8s.io.
KUBELET_UNIT = """\
[Unit]
Description=kubelet: The Kubernetes Node Agent
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
"""
KUBEADM_DROP_IN = """\
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""  # noqa: E501
PACKAGES = f"""
set -e
for disk in kubernetes kubeadm; do
    mkdir -p /mnt/$disk
    mountpoint -q /mnt/$disk || mount -o ro /dev/disk/by-label/$disk /mnt/$disk
done
ln -sf /mnt/kubernetes/kubelet /mnt/kubernetes/kubectl /mnt/kubeadm/kubeadm /usr/bin/
mkdir -p /usr/lib/systemd/system/kubelet.service.d /etc/kubernetes/manifests /etc/cni/net.d \
/opt/cni/bin
# Go's idle threads and collector take most of an emulated processor.
printf 'GOMAXPROCS=1\nGOGC=400\n' >/etc/default/kubelet
cat >/usr/lib/systemd/system/kubelet.service <<'E'
{KUBELET_UNIT}E
cat >/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf <<'E'
{KUBEADM_DROP_IN}E
systemctl daemon-reload
systemctl enable -q kubelet
"""


def install_packages(guest: Guest) -> None:
    """Install Kubernetes' packages on a guest with the disks `kubernetes` and `kubeadm`."""
    guest.ssh(PACKAGES)


class Cluster:
    """A control plane on the host, used as its administrator."""

    def __init__(self, control: GuestControlPlane) -> None:
        self.folder = control.folder
        self._config = self.folder / "administrator.conf"
        self._bin = toolchain.kubeadm().parent
        Authority(self.folder).write_kubeconfig(self._config, "admin", f"127.0.0.1:{control.port}")
        self._environment = os.environ | {
            "KUBECONFIG": str(self._config),
            "PATH": f"{self._bin}:{os.environ['PATH']}",
        }

    def run(self, script: str) -> str:
        """Run a shell script with kubectl and kubeadm as the administrator. Raises AssertionError
        with its output when it fails."""
        done = subprocess.run(
            ["sh", "-ec", script],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, (
            f"{script}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def prepare(self) -> None:
        """Run the phases of `kubeadm init` that nodes depend on, with the address by which guests
        reach the API server."""
        config = self.folder / "kubeadm.yaml"
        config.write_text(_documents())
        for phase in ("upload-config all", "bootstrap-token"):
            self.run(f"kubeadm init phase {phase} --config {config} --kubeconfig {self._config}")
        self._publish_address()

    def _publish_address(self) -> None:
        """Put the address by which guests reach the API server into the ConfigMap cluster-info, in
        place of the administrator's."""
        kubeconfig = self.run(
            "kubectl -n kube-public get configmap cluster-info -o 'jsonpath={.data.kubeconfig}'"
        )
        server = next(
            line.split()[1]
            for line in kubeconfig.splitlines()
            if line.strip().startswith("server:")
        )
        change = json.dumps(
            {"data": {"kubeconfig": kubeconfig.replace(server, f"https://{SERVICES}:{PORT}")}}
        )
        self.run(f"kubectl -n kube-public patch configmap cluster-info -p '{change}'")


def _documents() -> str:
    parts: list[dict[str, Any]] = [
        {
            "kind": "InitConfiguration",
            "nodeRegistration": {"criSocket": "unix:///run/pyrunc/cri.sock"},
        },
        {
            "kind": "ClusterConfiguration",
            "kubernetesVersion": toolchain.KUBERNETES,
            "controlPlaneEndpoint": f"{SERVICES}:{PORT}",
        },
    ]
    return "---\n".join(
        json.dumps({"apiVersion": "kubeadm.k8s.io/v1beta4", **part}) + "\n" for part in parts
    )
