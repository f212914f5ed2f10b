"""Runs a control plane on the host for a node in a guest: at the host's speed, on another processor
than the guest's. Its programs are started as in `vagrant/units`, with paths, addresses and ports of
the host."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import urllib3

from tests.support import toolchain
from tests.support.authority import Authority
from tests.support.guest import PROJECT, SERVICES, free_port
from tests.support.processes import Program, wait_until

UNITS = PROJECT / "vagrant" / "units"
# Settings with which nodes can join by themselves: roles, tokens, and a signer of their
# certificates.
JOINING = {
    "--authorization-mode=AlwaysAllow": (
        "--authorization-mode=Node,RBAC --enable-bootstrap-token-auth"
    ),
    "--controllers=": (
        "--cluster-signing-cert-file={0}/ca.crt --cluster-signing-key-file={0}/ca.key "
        "--controllers=bootstrap-signer-controller,certificatesigningrequest-approving-controller,"
        "certificatesigningrequest-signing-controller,"
    ),
}
STORAGE, CONTROLLERS = ("etcd", "kube-apiserver"), ("kube-controller-manager", "kube-scheduler")


class GuestControlPlane:
    """Runs etcd, API server, controllers and scheduler. `folder` has their files and the CA
    that also signs the node's certificates."""

    def __init__(
        self, folder: Path, port: int, *, joining: bool = False, by_name: bool = False
    ) -> None:
        """Take the settings.

        - `joining`: nodes are added by `kubeadm join`, with tokens, and get signed certificates.
        - `by_name`: the API server connects to kubelets by the names of their nodes, because only a
          guest has routes to the nodes' addresses.
        """
        self.folder, self.port, self._bin = folder, port, toolchain.kubernetes()
        self._programs = {name: Program(name, folder / "log") for name in (*STORAGE, *CONTROLLERS)}
        self._here = {
            "/opt/kubernetes/bin": str(self._bin),
            "/etc/kubernetes/pki": str(folder),
            "/etc/kubernetes": str(folder),
            "/var/lib/etcd": f"{folder}/etcd",
            "${NODE_ADDRESS}": "127.0.0.1",
            "--bind-address=0.0.0.0": "--bind-address=127.0.0.1",
            "=6443": f"={port}",
        }
        if by_name:
            self._here["--kubelet-preferred-address-types=InternalIP,Hostname"] = (
                "--kubelet-preferred-address-types=Hostname"
            )
        if joining:
            self._here |= {there: here.format(folder) for there, here in JOINING.items()}

    def start(self) -> None:
        """Start the programs; return when the API server answers."""
        # Chosen now: a guest boots for minutes before this, and other tests look for free ports
        # meanwhile.
        self._here |= {":2379": f":{free_port()}", ":2380": f":{free_port()}"}
        authority = Authority(self.folder)
        authority.make()
        authority.sign_for_cluster([f"IP:{SERVICES}"], ["node"])
        authority.write_kubeconfig(self.folder / "node.conf", "node", f"127.0.0.1:{self.port}")
        for name in STORAGE:
            self._programs[name].start(self._command(name))
        if not wait_until(self._answers, 120, 0.5):
            output = "\n".join(self._programs[name].tail(15) for name in STORAGE)
            raise RuntimeError(f"the API server is not there after 120 s\n{output}")
        for name in CONTROLLERS:  # port 0: no server
            self._programs[name].start([*self._command(name), "--secure-port=0"])

    def stop(self) -> None:
        """End the programs in the reverse order of their start."""
        for program in reversed(self._programs.values()):
            program.stop()

    def kubeconfig(self) -> Path:
        """Return the path of the administrator's kubeconfig, for use on the host."""
        path = self.folder / "admin.conf"
        Authority(self.folder).write_kubeconfig(path, "admin", f"127.0.0.1:{self.port}")
        return path

    def _command(self, unit: str) -> list[str]:
        """Return the command line of `unit`, with the paths, addresses and ports of the host."""
        text = (UNITS / f"{unit}.service").read_text()
        match = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
        assert match, unit
        line = match[1].replace("\\\n", " ")
        for there, here in self._here.items():
            line = line.replace(there, here)
        return shlex.split(line)

    def _answers(self) -> bool:
        own = self.folder
        with urllib3.HTTPSConnectionPool(
            "127.0.0.1", self.port, cert_file=f"{own}/admin.crt", key_file=f"{own}/admin.key",
            ca_certs=f"{own}/ca.crt", retries=False,
        ) as server:  # fmt: skip
            try:
                return server.request("GET", "/readyz", timeout=5).status == 200
            except urllib3.exceptions.HTTPError:
                return False
