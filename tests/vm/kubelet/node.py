"""The node under test: pods through the API server, their groups and processes through the kernel's
files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import groups
from tests.support.processes import comm, wait_until
from tests.vm.kubelet.api import Api, Json, Refused

PLACEHOLDER = "pyrunc-shim"
NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CGROUPS = Path("/sys/fs/cgroup")
KUBELET_DROP_IN = Path("/etc/kubernetes/kubelet.conf.d/50-test.conf")
CLASSES = {"Guaranteed": "", "Burstable": "burstable", "BestEffort": "besteffort"}
PATIENCE_S = 280.0  # for emulated, shared processors


class Node:
    """A one-node cluster. `driver` is the cgroup driver that server and kubelet use."""

    def __init__(self) -> None:
        self.api, self.driver = Api(), "systemd"
        self.socket = Path("/run/pyrunc/cri.sock")

    def wait_for_service_account(self) -> None:
        """Wait until the controller manager has made the namespace's service account, without which
        the API server admits no pods."""
        self.until(
            lambda: self.api.get(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts")["items"],
            "default service account",
        )

    # ---- pods

    def create(self, *manifests: Json) -> None:
        for manifest in manifests:
            self.api.create(PODS, manifest)

    def pod(self, name: str) -> Json:
        return self.api.get(f"{PODS}/{name}")

    def run(self, manifest: Json) -> Json:
        self.create(manifest)
        return self.ready(manifest["metadata"]["name"])

    def ready(self, name: str) -> Json:
        def condition() -> Json | None:
            pod = self.pod(name)
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
            return pod if conditions.get("Ready") == "True" else None

        return self.until(condition, f"pod {name} Ready", name)

    def ended(self, name: str, container: str = "c") -> Json:
        """Wait until the container has terminated; return its final state."""

        def condition() -> Json | None:
            for status in self.pod(name)["status"].get("containerStatuses", []):
                if status["name"] == container:
                    ended: Json | None = status["state"].get("terminated") or status[
                        "lastState"
                    ].get("terminated")
                    return ended
            return None

        return self.until(condition, f"end of {name}/{container}", name)

    def remove(self, *names: str) -> None:
        """Delete pods at once and wait until they and their groups are gone."""
        uids = []
        for name in names:
            try:
                uids.append(self.pod(name)["metadata"]["uid"])
            except Refused as refused:
                assert refused.status == 404, refused
            self.api.delete(f"{PODS}/{name}?gracePeriodSeconds=0")
        self.until(
            lambda: not {p["metadata"]["name"] for p in self.pods()} & set(names),
            f"deletion of {names}",
        )
        marks = [form for uid in uids for form in (uid, uid.replace("-", "_"))]
        self.until(
            lambda: not [group for mark in marks for group in groups.below(CGROUPS, mark)],
            "removal of the pods' groups",
        )

    def pods(self) -> list[Json]:
        pods: list[Json] = self.api.get(PODS)["items"]
        return pods

    def events(self, name: str) -> list[str]:
        """Return the pod's events, each as `reason: message`."""
        listing = self.api.get(
            f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name%3D{name}"
        )
        return [f"{e['reason']}: {e.get('message', '')}" for e in listing["items"]]

    def until(
        self,
        condition: Callable[[], Any],
        what: str,
        name: str = "",
        patience_s: float = PATIENCE_S,
    ) -> Any:
        """Poll until the condition is true and return its value. The error after a timeout has the
        events of the pod `name`."""
        answers: list[Any] = []

        def ask() -> Any:
            answers[:] = [condition()]
            return answers[0]

        if wait_until(ask, patience_s, 0.5):
            return answers[0]
        story = (
            [json.dumps(self.pod(name)["status"], indent=1)[-4000:], *self.events(name)[-20:]]
            if name
            else []
        )
        raise AssertionError(
            "\n".join(
                [
                    f"{what}: not within {patience_s:.0f} s",
                    *story,
                    journal("pyrunc-cri"),
                    journal("kubelet"),
                ]
            )
        )

    # ---- groups and processes

    def pod_group(self, pod: Json) -> Path:
        """Return the cgroup in which kubelet puts the pod: by its class and UID, in the driver's
        form."""
        quality = CLASSES[pod["status"]["qosClass"]]
        uid = pod["metadata"]["uid"]
        if self.driver == "cgroupfs":
            return CGROUPS / "kubepods" / quality / f"pod{uid}"
        parents, name = ["kubepods.slice"], "kubepods"
        if quality:
            name += f"-{quality}"
            parents.append(f"{name}.slice")
        return CGROUPS.joinpath(*parents, f"{name}-pod{uid.replace('-', '_')}.slice")

    def group(self, pod: Json, container: str = "c") -> Path:
        """Return the cgroup of the container, below the pod's."""
        identifier = self.container_id(pod, container)
        leaf = f"cri-pyrunc-{identifier}.scope" if self.driver == "systemd" else identifier
        return self.pod_group(pod) / leaf

    def container_id(self, pod: Json, container: str = "c") -> str:
        """Return the id without its scheme."""
        (status,) = [s for s in pod["status"]["containerStatuses"] if s["name"] == container]
        scheme, _, identifier = status["containerID"].partition("://")
        assert scheme == "pyrunc"
        return str(identifier)

    def main_pid(self, pod: Json, container: str = "c") -> int:
        """Return the pid of the container's first process, from its cgroup."""
        pids = map(int, (self.group(pod, container) / "cgroup.procs").read_text().split())
        # Without the placeholder process of a new scope.
        return min(filter(_is_of_container, pids))

    # ---- kubelet and the server

    def configure_kubelet(self, **settings: Any) -> None:
        """Restart kubelet with the provisioned configuration and these `settings`."""
        whole = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            **settings,
        }
        KUBELET_DROP_IN.unlink(missing_ok=True)
        if settings:
            KUBELET_DROP_IN.write_text(json.dumps(whole))
        systemctl("stop", "kubelet")
        for state in ("cpu_manager_state", "memory_manager_state"):
            (Path("/var/lib/kubelet") / state).unlink(missing_ok=True)
        before = self._heartbeat()
        systemctl("start", "kubelet")
        self.until(
            lambda: self._heartbeat() not in ("", before), "the node after kubelet's restart"
        )

    def _heartbeat(self) -> str:
        """Return the time of the node's last Ready heartbeat, empty while it is not Ready."""
        for condition in self.node()["status"]["conditions"]:
            if condition["type"] == "Ready" and condition["status"] == "True":
                return str(condition["lastHeartbeatTime"])
        return ""

    def node(self) -> Json:
        return self.api.get("/api/v1/nodes/node1")

    def summary(self) -> Json:
        return self.api.summary()


def systemctl(*arguments: str) -> str:
    """Run systemctl; return its output without the last newline."""
    return subprocess.run(
        ["systemctl", *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def journal(unit: str, lines: int = 40) -> str:
    """Return the end of a unit's log."""
    command = ["journalctl", "--no-pager", "-o", "cat", "-n", str(lines), "-u", unit]
    return (
        f"--- {unit}\n"
        + subprocess.run(command, capture_output=True, text=True, check=False).stdout
    )


def fact(group: Path, name: str) -> str:
    return (group / name).read_text().strip()


def _is_of_container(pid: int) -> bool:
    try:
        return comm(pid) != PLACEHOLDER
    except (FileNotFoundError, ProcessLookupError):
        return False
