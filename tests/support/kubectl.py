"""Runs kubectl on the host, for clusters in namespaces and in guests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from tests.support import toolchain


class Hosted(Protocol):
    """A node; `host` is its name in Kubernetes."""

    host: str


class Kubectl:
    """A cluster that kubectl reaches by the file `kubeconfig`."""

    kubeconfig: Path
    kubectl_timeout_s = 120.0

    def kubectl(
        self, *arguments: str, check: bool = True, timeout_s: float | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl. With `check`, raises AssertionError with its output when it fails."""
        command = [*self.kubectl_command(), *arguments]
        limit_s = timeout_s or self.kubectl_timeout_s
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, **options)  # type: ignore[call-overload]
        if check and done.returncode:
            raise AssertionError(
                f"kubectl {' '.join(arguments)}: exit code"
                f" {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done  # type: ignore[no-any-return]

    def kubectl_command(self) -> list[str]:
        """Return kubectl's command line up to the verb."""
        return [str(toolchain.kubernetes() / "kubectl"), "--kubeconfig", str(self.kubeconfig)]

    def is_ready(self, node: Hosted) -> bool:
        """Return whether the API server has the node as Ready."""
        path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "node", node.host, "-o", path, check=False).stdout == "True"

    def pod_range(self, node: Hosted) -> str:
        """Return the node's pod CIDR; empty until it has one."""
        return self.kubectl(
            "get", "node", node.host, "-o", "jsonpath={.spec.podCIDR}", check=False
        ).stdout
