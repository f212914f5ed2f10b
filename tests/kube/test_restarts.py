"""Tests that nothing is lost when server or kubelet is killed while pods run, or the node
reboots."""

from __future__ import annotations

import shutil
import signal
import time

from tests.kube.pods import Kube, pod, shell


def test_kill_9_of_the_server_loses_nothing(kube: Kube) -> None:
    node = kube.cluster.node
    kube.run(pod("counter", shell("i=0; while true; do echo $i; i=$((i+1)); sleep 0.05; done")))
    folder = kube.cluster.folder / f"end-{kube.namespace}"
    volume = {"name": "v", "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"}}
    ender = shell(
        "until [ -e /v/end ]; do sleep 0.1; done; echo bye; exit 9",
        volumeMounts=[{"name": "v", "mountPath": "/v"}],
    )
    kube.apply(pod("ender", ender, restartPolicy="Never", volumes=[volume]))
    kube.ready("ender")
    started = kube.get("counter")["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    ending = kube.get("ender")["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    before = len(kube.logs("counter").split())
    node.server.stop(signal.SIGKILL)
    (folder / "end").touch()
    kube.until(
        (node.folder / "state" / "containers" / ending / "exit.json").exists, "the shim's record"
    )
    time.sleep(2)  # the other pod keeps counting
    node.start_server()
    kube.until(
        lambda: kube.get("ender")["status"]["phase"] == "Failed",
        "the exit code of the container that ended meanwhile",
    )
    ended = kube.get("ender")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 9
    assert kube.logs("ender") == "bye\n"
    status = kube.get("counter")["status"]["containerStatuses"][0]
    assert (status["restartCount"], status["state"]["running"]["startedAt"]) == (0, started)
    numbers = [int(n) for n in kube.logs("counter").split()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > before
    assert kube.sh("counter", "echo works") == "works"
    kube.run(pod("next"))  # kubelet does not send the node's pod CIDR again


def test_a_restarted_kubelet_finds_its_pods(kube: Kube) -> None:
    kube.run(pod("p"))
    before = kube.get("p")["status"]["containerStatuses"][0]["containerID"]
    kubelet = kube.cluster.programs["kubelet"]
    kubelet.stop(signal.SIGKILL)
    time.sleep(1)
    kube.cluster.start_kubelet()
    kube.until(
        lambda: kube("exec", "p", "--", "true", check=False).returncode == 0,
        "an exec after the restart",
    )
    status = kube.get("p")["status"]["containerStatuses"][0]
    assert (status["containerID"], status["restartCount"]) == (before, 0)


def test_a_reboot_leaves_everything_removable(kube: Kube) -> None:
    """After the reboot the pods come back with new sandboxes."""
    node, kubelet = kube.cluster.node, kube.cluster.programs["kubelet"]
    kube.run(pod("p"))
    first = kube.get("p")["status"]["containerStatuses"][0]["containerID"]
    # As after a reboot: no process, no state directory, and another boot id.
    kubelet.stop(signal.SIGKILL)
    node.kill_everything()
    shutil.rmtree(node.folder / "state")
    node.start_server(boot_id="11111111-2222-3333-4444-555555555555")
    kube.cluster.start_kubelet()

    def back() -> bool:
        status = kube.get("p")["status"].get("containerStatuses", [{}])[0]
        return bool(
            status.get("containerID", first) != first and "running" in status.get("state", {})
        )

    kube.until(back, "the pod after the reboot", 90)
    assert kube.sh("p", "echo again") == "again"
