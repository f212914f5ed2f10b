"""`make bench-kubelet`: times pods through a real kubelet on containerd + runc, CRI-O + crun and
our server.

One cluster has a node with each server. Rounds alternate between the nodes: all pods of a round are
posted at once, bound to the node, and the API is watched until each is Ready; then they are
deleted. CPU time is the machine's, without the idle cluster's, which is measured just before.
Options are words of BENCH: BENCH='--pods 40 --rounds 3'.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench import servers
from tests.bench.crio import Crio
from tests.bench.load import busy_seconds, version
from tests.bench.peer import Containerd, pause_archive
from tests.bench.tables import Result, medians, table, where
from tests.support import cri, images, session, toolchain
from tests.support.cluster import NODE_IP, Cluster, Node
from tests.support.processes import clean_up_on_signals, wait_until

RESULT = Path("build/figures/kubelet.json")
PODS = "/api/v1/namespaces/default/pods"
IDLE_S, SETTLE_S, TIMEOUT_S = 10.0, 5.0, 120.0
UNITS = {
    "post to Ready": "s",
    "post to all Ready": "s",
    "CPU of the machine per pod": "ms",
    "CPU of the machine per deleted pod": "ms",
}


class OurNode(Node):
    """A node with our server, which has loaded the image."""

    title = "pyrunc"

    def start_server(self, *arguments: Any, **options: Any) -> None:
        super().start_server(*arguments, **options)
        self.load(images.busybox())


class PeerNode(Node):
    title: str
    kind: type[Containerd] | type[Crio]

    def __init__(self, folder: Path, name: str, number: int) -> None:
        super().__init__(folder, name, number)
        self.peer = self.kind(folder, name)
        self.socket, self.server = self.peer.socket, self.peer.program

    def start_server(self, *_arguments: Any, **_options: Any) -> None:
        self.peer.mounts = f"/proc/{self.mounts.pid}/ns/mnt"
        self.peer.start([images.busybox(), pause_archive(self.folder)])

    def write_configuration(self, network: Any = None) -> None:
        """Do nothing, because the peer writes its own configuration."""

    def stop(self) -> None:
        if self.server.pid and self.answers():
            self.remove_everything()
        self.peer.stop()
        super().stop()


class ContainerdNode(PeerNode):
    title, kind = "containerd + runc", Containerd


class CrioNode(PeerNode):
    title, kind = "CRI-O + crun", Crio


KINDS: dict[str, type[Node]] = {"containerd": ContainerdNode, "crio": CrioNode, "pyrunc": OurNode}


class Api:
    """Uses Kubernetes' API with an administrator's rights. `ready` and `gone` map a pod to the time
    when it was first seen Ready or gone."""

    def __init__(self, pki: Path) -> None:
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._connection = self._connect()
        self.ready: dict[str, float] = {}
        self.gone: dict[str, float] = {}

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send one request. Raises an error when it fails."""
        headers = {"Content-Type": "application/json"}
        self._connection.request(method, path, json.dumps(body) if body else None, headers)
        response = self._connection.getresponse()
        text = response.read()
        if response.status >= 300:
            raise RuntimeError(
                f"{method} {path}: {response.status} {text.decode(errors='replace')}"
            )
        return json.loads(text)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """During the `with` block, record in `ready` and `gone` when pods become Ready or are
        gone."""
        connection = self._connect()
        connection.request("GET", f"{PODS}?watch=1&resourceVersion=0")
        response = connection.getresponse()
        thread = threading.Thread(target=self._watch, args=(response,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            if connection.sock is not None:
                connection.sock.shutdown(2)
            thread.join(5)
            connection.close()

    def _watch(self, response: http.client.HTTPResponse) -> None:
        while line := response.readline():
            event = json.loads(line)
            name, now = event["object"]["metadata"]["name"], time.perf_counter()
            conditions = event["object"].get("status", {}).get("conditions", [])
            if event["type"] == "DELETED":
                self.gone[name] = now
            elif any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                self.ready.setdefault(name, now)

    def _connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(NODE_IP, 6443, context=self._context, timeout=TIMEOUT_S)


class Bench:
    def __init__(self, node: Node, title: str, kubernetes: Api) -> None:
        self.node, self.name, self._api = node, title, kubernetes
        self.samples: dict[str, list[float]] = defaultdict(list)
        with cri.connect(node.socket) as client:
            self.version = version(
                client, node.peer.runtime() if isinstance(node, PeerNode) else ""
            )

    def round(self, label: str, pods: int) -> None:
        """Post `pods` pods at once, wait until all are Ready, and delete them."""
        names = [f"{label}-{self.node.host}-{number}" for number in range(pods)]
        idle = _idle_rate()
        cpu, begin = busy_seconds(), time.perf_counter()
        posted = {}
        for name in names:
            posted[name] = time.perf_counter()
            self._api.call("POST", PODS, self._manifest(name))
        self._wait(self._api.ready, names, "Ready")
        last = max(self._api.ready[name] for name in names)
        cpu_s = busy_seconds() - cpu - idle * (time.perf_counter() - begin)
        self.samples["post to Ready"].append(
            statistics.median(self._api.ready[n] - posted[n] for n in names)
        )
        self.samples["post to all Ready"].append(last - begin)
        self.samples["CPU of the machine per pod"].append(cpu_s * 1e3 / pods)
        time.sleep(SETTLE_S)
        cpu, begin = busy_seconds(), time.perf_counter()
        for name in names:
            self._api.call("DELETE", f"{PODS}/{name}")
        self._wait(self._api.gone, names, "gone")
        # kubelet would take minutes
        cri.remove_pods_beside_others(self.node.socket, TIMEOUT_S)
        cpu_s = busy_seconds() - cpu - idle * (time.perf_counter() - begin)
        self.samples["CPU of the machine per deleted pod"].append(cpu_s * 1e3 / pods)
        time.sleep(SETTLE_S)

    def _wait(self, seen: dict[str, float], names: Sequence[str], what: str) -> None:
        if not wait_until(lambda: all(name in seen for name in names), TIMEOUT_S):
            missing = [name for name in names if name not in seen]
            raise RuntimeError(
                f"{self.name}: {len(missing)} pods are not {what}:\n{self.node.server.tail()}"
            )

    def _manifest(self, name: str) -> dict[str, Any]:
        container = {
            "name": "c",
            "image": servers.IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sleep", "3600"],
        }
        spec = {
            "nodeName": self.node.host,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _idle_rate() -> float:
    """Return the CPU seconds per second that the machine uses now."""
    cpu, begin = busy_seconds(), time.perf_counter()
    time.sleep(IDLE_S)
    return (busy_seconds() - cpu) / (time.perf_counter() - begin)


@contextmanager
def cluster(folder: Path, kinds: Sequence[str]) -> Iterator[Cluster]:
    """Provide a cluster with a node of each of these kinds. The nodes' state is on a tmpfs, as on
    /run."""
    clean_up_on_signals()
    running = Cluster(folder, session.name("bench-kube"), kinds=[KINDS[kind] for kind in kinds])
    try:
        for node in running.nodes:
            state = node.folder / "state"
            state.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "state", state], check=True)
        running.up()
        account = f"{PODS.removesuffix('pods')}serviceaccounts/default"
        running.wait_for(
            "service account",
            lambda: running.kubectl("get", "--raw", account, check=False).returncode == 0,
            60,
        )
        yield running
    finally:
        running.down()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=40, help="pods of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--servers", default=",".join(servers.ALL), help="which to run, ours the last"
    )
    parser.add_argument("--json", type=Path, default=RESULT, help="write the result to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-kubelet-"))
    try:
        with cluster(folder, options.servers.split(",")) as running:
            result = measure(running, options.pods, options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.write(options.json)
    print(f"{result.where}\n{result.what}")
    for rows in result.groups.values():
        print("\n".join(["", *table(result.names, rows)]))


def measure(running: Cluster, pods: int, rounds: int) -> Result:
    """Run a warm-up of each node, then rounds on the nodes in turn; return the medians."""
    kubernetes = Api(running.control.pki)
    benches = [Bench(node, node.title, kubernetes) for node in running.nodes]  # type: ignore[attr-defined]
    with kubernetes.watching():
        for bench in benches:
            bench.round("warm", 2)
            bench.samples.clear()
        for number in range(rounds):
            for bench in benches:
                bench.round(f"r{number}", pods)
    samples = [bench.samples for bench in benches]
    rows = [row for step, unit in UNITS.items() for row in medians(samples, [step], unit)]
    versions = [bench.version for bench in benches]
    title = f"{pods} pods at once through kubelet {toolchain.KUBERNETES.removeprefix('v')}"
    what = f"{title}, {rounds} rounds"
    return Result([b.name for b in benches], versions, where(versions), what, {title: rows})


if __name__ == "__main__":
    main()
