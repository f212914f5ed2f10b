"""Gives the Kubernetes tests access to the cluster: manifests as dicts, and kubectl."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster

Manifest = dict[str, Any]


def pod(name: str, *containers: Manifest, **spec: Any) -> Manifest:
    """Return a Pod manifest. By default the containers are named `c`, `c2`, … and use busybox."""
    named = [
        {
            "name": "c" if i == 0 else f"c{i + 1}",
            "image": "busybox",
            "imagePullPolicy": "IfNotPresent",
            **c,
        }
        for i, c in enumerate(containers or ({"command": ["sleep", "3600"]},))
    ]
    body = {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        **spec,
        "containers": named,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": body,
    }


# nginx, with a probe: a container without one is Ready before its program listens.
SERVING: Manifest = {
    "image": "nginx",
    "readinessProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 1},
}


def shell(script: str, **more: Any) -> Manifest:
    """Return a busybox container that runs `script`."""
    return {"command": ["sh", "-c", script], **more}


class Kube:
    """Runs kubectl in one namespace."""

    def __init__(self, cluster: Cluster, test: str) -> None:
        self.cluster = cluster
        self.namespace = (
            re.sub(r"[^a-z0-9]+", "-", test.lower()).strip("-")[:50]
            + f"-{int(time.time()) % 10000}"
        )

    def __call__(
        self, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("-n", self.namespace, *arguments, check=check, **options)

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(*arguments), **options)

    def command(self, *arguments: str, kubectl: Path | None = None) -> list[str]:
        """Return the command line of kubectl in this namespace. `kubectl`: the program, by default
        the cluster's."""
        return [
            str(kubectl or self.cluster.bin / "kubectl"),
            "--kubeconfig",
            str(self.cluster.kubeconfig),
            "-n",
            self.namespace,
            *arguments,
        ]

    def create_namespace(self) -> None:
        """Create the namespace, with the service account that pods need."""
        self.cluster.kubectl("create", "namespace", self.namespace)
        self.until(
            lambda: self("get", "serviceaccount", "default", check=False).returncode == 0,
            "default service account",
        )

    def delete_namespace(self) -> None:
        """Delete all pods at once, then the namespace in the background."""
        # Most pods run `sleep`, which ignores SIGTERM as process 1 and has to be killed.
        kinds = "pods,deployments,replicasets"
        self(
            "delete",
            kinds,
            "--all",
            "--grace-period=1",
            "--wait=true",
            "--timeout=60s",
            check=False,
        )
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)

    def apply(self, *manifests: Manifest) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        self("apply", "-f", "-", input=text)

    def run(self, manifest: Manifest, timeout_s: int = 60) -> Manifest:
        """Apply a pod, wait until it is Ready, return it."""
        self.apply(manifest)
        return self.ready(manifest["metadata"]["name"], timeout_s)

    def ready(self, name: str, timeout_s: int = 60) -> Manifest:
        """Wait until the pod is Ready and return it. On a timeout the error describes the pod."""
        done = self(
            "wait",
            "--for=condition=Ready",
            f"pod/{name}",
            f"--timeout={timeout_s}s",
            check=False,
            timeout_s=timeout_s + 30,
        )
        assert done.returncode == 0, (
            done.stderr
            + self("describe", "pod", name, check=False).stdout
            + self.cluster.node.server.tail(20)
        )
        return self.get(name)

    def finished(self, manifest: Manifest, timeout_s: int = 60) -> Manifest:
        """Apply a pod, wait until it is Succeeded or Failed, return it."""
        name = manifest["metadata"]["name"]
        self.apply(manifest)
        self.until(
            lambda: self.get(name)["status"].get("phase") in ("Succeeded", "Failed"),
            f"end of pod {name}",
            timeout_s,
        )
        return self.get(name)

    def get(self, name: str) -> Manifest:
        document: Manifest = json.loads(self("get", "pod", name, "-o", "json").stdout)
        return document

    def exec(
        self, name: str, *command: str, container: str = "c", check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return self("exec", name, "-c", container, "--", *command, check=check, **options)

    def sh(self, name: str, script: str, container: str = "c") -> str:
        """Return the stripped output of a shell script in the container."""
        return self.exec(name, "sh", "-c", script, container=container).stdout.strip()

    def logs(self, name: str, *arguments: str) -> str:
        return self("logs", name, *arguments).stdout

    def events(self) -> Iterable[str]:
        """Return `reason: message` of all events of the namespace."""
        for event in json.loads(self("get", "events", "-o", "json").stdout)["items"]:
            yield f"{event['reason']}: {event.get('message', '')}"

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        """Wait until `condition()` is true and return its value; on a timeout fail with the state
        of all pods."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = condition()
            if answer:
                return answer
            if time.monotonic() > deadline:
                state = self("describe", "pods", check=False).stdout[-6000:]
                raise AssertionError(
                    f"{what}: not within {timeout_s:.0f}"
                    f" s\n{state}\n{self.cluster.node.server.tail(20)}"
                )
            time.sleep(0.2)
