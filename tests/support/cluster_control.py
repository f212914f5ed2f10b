"""A cluster's control plane from nothing: certificates, kubeconfigs, etcd, API server, controller manager, scheduler."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.cluster_node import NODE_IP, Node
from tests.support.processes import Program

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
POD_RANGE, POD_RANGE6, SERVICE_RANGE = "10.244.0.0/16", "fd77:244::/48", "10.96.0.0/16"
"""Each node gets a /24 of the first and a /64 of the second."""


class ControlPlane:
    """The programs, run in the namespaces of `node`. `folder` holds their files, `folder/kubeconfig` is for outside."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder, self._node, self.pki = folder, node, folder / "pki"
        self.kubeconfig = folder / "kubeconfig"
        self.programs = {name: Program(name, folder / "log") for name in PROGRAMS}

    def node_kubeconfig(self, node: Node) -> Path:
        """What kubelet and other programs of a node use."""
        return self.folder / f"{node.host}.kubeconfig"

    def make_certificates(self, nodes: Sequence[Node]) -> None:
        """One authority, a certificate for the API server, for the administrator and for each node, kubeconfigs."""
        pki = self.pki
        pki.mkdir(exist_ok=True)
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        _openssl(
            "req", "-x509", *key, "-keyout", f"{pki}/ca.key", "-out", f"{pki}/ca.crt", "-days", "365", "-subj", "/CN=ca",
        )  # fmt: skip
        hosts = ",".join(f"DNS:{node.host}" for node in nodes)
        (pki / "names").write_text(
            f"subjectAltName=IP:127.0.0.1,IP:10.96.0.1,IP:{NODE_IP},DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,{hosts}"
        )
        subjects = {"apiserver": "/CN=kube-apiserver", "admin": "/O=system:masters/CN=admin"}
        subjects |= {node.host: f"/O=system:masters/CN=system:node:{node.host}" for node in nodes}
        for name, subject in subjects.items():
            _openssl(
                "req", *key, "-keyout", f"{pki}/{name}.key", "-out", f"{pki}/{name}.csr", "-subj", subject
            )
            _openssl(
                "x509", "-req", "-in", f"{pki}/{name}.csr", "-CA", f"{pki}/ca.crt", "-CAkey", f"{pki}/ca.key", "-CAcreateserial",
                "-days", "365", "-out", f"{pki}/{name}.crt", "-extfile", f"{pki}/names",
            )  # fmt: skip
        _openssl("genrsa", "-out", f"{pki}/sa.key", "2048")
        _openssl("rsa", "-in", f"{pki}/sa.key", "-pubout", "-out", f"{pki}/sa.pub")
        self._write_kubeconfig(self.kubeconfig, "admin")
        for node in nodes:
            self._write_kubeconfig(self.node_kubeconfig(node), node.host)

    def start_storage(self, programs: Path) -> None:
        """etcd and the API server; that one does not answer at once."""
        pki, folder = self.pki, self.folder
        etcd, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        self._start(
            programs / "etcd", "--data-dir", f"{folder}/etcd", "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--unsafe-no-fsync", "--log-level", "warn",
        )  # fmt: skip
        self._start(
            programs / "kube-apiserver", "--etcd-servers", etcd, "--bind-address", "0.0.0.0", "--advertise-address", NODE_IP, "--secure-port", "6443",
            "--tls-cert-file", f"{pki}/apiserver.crt", "--tls-private-key-file", f"{pki}/apiserver.key", "--client-ca-file", f"{pki}/ca.crt",
            "--service-account-key-file", f"{pki}/sa.pub", "--service-account-signing-key-file", f"{pki}/sa.key",
            "--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", SERVICE_RANGE,
            "--authorization-mode", "RBAC", "--allow-privileged=true", "--endpoint-reconciler-type", "none",
            "--kubelet-client-certificate", f"{pki}/admin.crt", "--kubelet-client-key", f"{pki}/admin.key",
            "--kubelet-preferred-address-types", "InternalIP,Hostname",
        )  # fmt: skip

    def start_controllers(self, programs: Path) -> None:
        """The controller manager, which gives each node its range of pod addresses, and the scheduler."""
        own = str(self.node_kubeconfig(self._node))
        self._start(
            programs / "kube-controller-manager", "--kubeconfig", own, "--service-account-private-key-file", f"{self.pki}/sa.key",
            "--root-ca-file", f"{self.pki}/ca.crt", "--use-service-account-credentials", "--leader-elect=false",
            "--allocate-node-cidrs", "--cluster-cidr", f"{POD_RANGE},{POD_RANGE6}",
        )  # fmt: skip
        self._start(programs / "kube-scheduler", "--kubeconfig", own, "--leader-elect=false")

    def stop(self) -> None:
        """End the programs, the first last."""
        for name in reversed(PROGRAMS):
            self.programs[name].stop()

    def _start(self, program: Path, *arguments: str) -> None:
        self.programs[program.name].start(self._node.inside(str(program), *arguments))

    def _write_kubeconfig(self, path: Path, user: str) -> None:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "pyrunc",
            "clusters": [{"name": "pyrunc", "cluster": {"server": f"https://{NODE_IP}:6443", "certificate-authority": f"{self.pki}/ca.crt"}}],
            "users": [{"name": user, "user": {"client-certificate": f"{self.pki}/{user}.crt", "client-key": f"{self.pki}/{user}.key"}}],
            "contexts": [{"name": "pyrunc", "context": {"cluster": "pyrunc", "user": user}}],
        }  # fmt: skip
        path.write_text(json.dumps(config, indent=1))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
