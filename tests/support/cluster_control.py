"""A cluster's control plane from scratch: certificates, kubeconfigs, etcd, API server, controller
manager, scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.authority import Authority
from tests.support.cluster_node import NODE_IP, Node
from tests.support.processes import Program

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
POD_RANGE, POD_RANGE6, SERVICE_RANGE = "10.244.0.0/16", "fd77:244::/48", "10.96.0.0/16"
"""Each node gets a /24 of the first and a /64 of the second."""


class ControlPlane:
    """Runs the control plane's programs in the namespaces of `node`. `folder` has their files, and
    `kubeconfig` for clients outside the node."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder, self._node, self.pki = folder, node, folder / "pki"
        self.kubeconfig = folder / "kubeconfig"
        self.programs = {name: Program(name, folder / "log") for name in PROGRAMS}

    def node_kubeconfig(self, node: Node) -> Path:
        """Return the path of the kubeconfig for kubelet and other programs of a node."""
        return self.folder / f"{node.host}.kubeconfig"

    def make_certificates(self, nodes: Sequence[Node]) -> None:
        """Make a CA, certificates for the API server, the administrator and each node, and
        kubeconfigs."""
        authority = Authority(self.pki)
        authority.make()
        hosts = [node.host for node in nodes]
        authority.sign_for_cluster([f"IP:{NODE_IP}", *(f"DNS:{host}" for host in hosts)], hosts)
        authority.write_kubeconfig(self.kubeconfig, "admin", f"{NODE_IP}:6443")
        for node in nodes:
            authority.write_kubeconfig(self.node_kubeconfig(node), node.host, f"{NODE_IP}:6443")

    def start_storage(self, programs: Path) -> None:
        """Start etcd and the API server, without waiting until they answer."""
        pki, folder = self.pki, self.folder
        etcd, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self._start(
            programs / "etcd",
            "--data-dir",
            f"{folder}/etcd",
            "--listen-client-urls",
            etcd,
            "--advertise-client-urls",
            etcd,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
            "--unsafe-no-fsync",
            "--log-level",
            "warn",
        )
        self._start(
            programs / "kube-apiserver",
            "--etcd-servers",
            etcd,
            "--bind-address",
            "0.0.0.0",
            "--advertise-address",
            NODE_IP,
            "--secure-port",
            "6443",
            "--tls-cert-file",
            f"{pki}/apiserver.crt",
            "--tls-private-key-file",
            f"{pki}/apiserver.key",
            "--client-ca-file",
            f"{pki}/ca.crt",
            "--service-account-key-file",
            f"{pki}/sa.pub",
            "--service-account-signing-key-file",
            f"{pki}/sa.key",
            "--service-account-issuer",
            "https://kubernetes.default.svc",
            "--service-cluster-ip-range",
            SERVICE_RANGE,
            "--authorization-mode",
            "RBAC",
            "--allow-privileged=true",
            "--kubelet-client-certificate",
            f"{pki}/admin.crt",
            "--kubelet-client-key",
            f"{pki}/admin.key",
            "--kubelet-preferred-address-types",
            "InternalIP,Hostname",
            "--requestheader-client-ca-file",
            f"{pki}/ca.crt",
            "--requestheader-allowed-names",
            "front-proxy",
            "--requestheader-username-headers",
            "X-Remote-User",
            "--requestheader-group-headers",
            "X-Remote-Group",
            "--requestheader-extra-headers-prefix",
            "X-Remote-Extra-",
            "--proxy-client-cert-file",
            f"{pki}/front-proxy.crt",
            "--proxy-client-key-file",
            f"{pki}/front-proxy.key",
        )

    def start_controllers(self, programs: Path) -> None:
        """Start the controller manager, which assigns each node its pod CIDRs, and the
        scheduler."""
        own = str(self.node_kubeconfig(self._node))
        self._start(
            programs / "kube-controller-manager",
            "--kubeconfig",
            own,
            "--service-account-private-key-file",
            f"{self.pki}/sa.key",
            "--root-ca-file",
            f"{self.pki}/ca.crt",
            "--use-service-account-credentials",
            "--leader-elect=false",
            "--cluster-signing-cert-file",
            f"{self.pki}/ca.crt",
            "--cluster-signing-key-file",
            f"{self.pki}/ca.key",
            "--allocate-node-cidrs",
            "--cluster-cidr",
            f"{POD_RANGE},{POD_RANGE6}",
        )
        self._start(programs / "kube-scheduler", "--kubeconfig", own, "--leader-elect=false")

    def stop(self) -> None:
        """End the programs in the reverse order of their start."""
        for name in reversed(PROGRAMS):
            self.programs[name].stop()

    def _start(self, program: Path, *arguments: str) -> None:
        self.programs[program.name].start(self._node.inside(str(program), *arguments))
