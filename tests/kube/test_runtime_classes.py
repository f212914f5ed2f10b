"""Tests RuntimeClasses: a pod gets the handler of its class, and a running server accepts a new
handler."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.pods import Kube, pod, shell
from tests.support.cluster import Cluster
from tests.support.processes import wait_until

HANDLER = "command"


@pytest.fixture(scope="module")
def handler(cluster: Cluster) -> Iterator[str]:
    """Provide a handler, and a RuntimeClass of its name, whose external OCI runtime is pyrunc's
    command line."""
    file = cluster.node.folder / "config.toml.d" / "50-runtimes.toml"
    file.parent.mkdir()
    binary = Path(sys.executable).parent / "pyrunc"
    file.write_text(
        f'[runtimes.{HANDLER}]\nbinary = "{binary}"\narguments = ["--missing-controllers",'
        ' "warn"]\n'
    )
    for name in (HANDLER, "unknown"):
        cluster.kubectl("apply", "-f", "-", input=json.dumps(runtime_class(name)))
    os.kill(cluster.node.server.pid, signal.SIGHUP)
    # kubelet refuses pods of a handler that the server does not report.
    assert wait_until(lambda: HANDLER in handlers(cluster), 90), handlers(cluster)
    yield HANDLER
    for name in (HANDLER, "unknown"):
        cluster.kubectl("delete", "runtimeclass", name)
    file.unlink()
    file.parent.rmdir()
    os.kill(cluster.node.server.pid, signal.SIGHUP)


def runtime_class(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": name},
        "handler": name,
    }


def handlers(cluster: Cluster) -> dict[str, Any]:
    """Return a dict: name -> features, of the handlers that kubelet reports for the node."""
    (node,) = json.loads(cluster.kubectl("get", "nodes", "-o", "json").stdout)["items"]
    return {
        each.get("name", ""): each.get("features", {}) for each in node["status"]["runtimeHandlers"]
    }


def test_a_pod_runs_with_the_handler_of_its_class(kube: Kube, handler: str) -> None:
    kube.run(pod("p", shell("echo hello; exec sleep 3600"), runtimeClassName=handler))
    assert kube.sh("p", "hostname").strip() == "p"
    assert kube("logs", "p").stdout == "hello\n"
    (uid,) = {kube.get("p")["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]}
    folders = list(kube.cluster.node.folder.rglob(f"containers/{uid}/runtime"))
    assert folders and any(folders[0].iterdir())  # the external runtime ran it
    assert handlers(kube.cluster)[handler]["recursiveReadOnlyMounts"]
    assert not handlers(kube.cluster)[handler].get("userNamespaces")


def test_a_class_with_an_unknown_handler_fails_the_pod(kube: Kube, handler: str) -> None:
    kube.apply(pod("q", runtimeClassName="unknown"))
    kube.until(
        lambda: "unknown runtime handler" in kube("describe", "pod", "q").stdout,
        "kubelet's event",
        60,
    )
