"""Tests init and sidecar containers, hooks, probes, crashes, deletion, garbage collection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.kube.pods import Kube, pod, shell


def test_init_containers_run_in_order_and_sidecars_stay(kube: Kube) -> None:
    write = {
        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        "image": "busybox",
        "imagePullPolicy": "IfNotPresent",
    }
    init = [
        {"name": "one", **shell("echo one >>/v/order"), **write},
        {
            "name": "side",
            "restartPolicy": "Always",
            **shell("echo side >>/v/order; sleep 3600"),
            **write,
        },
        {"name": "two", **shell("echo two >>/v/order"), **write},
    ]
    main = shell(
        "echo main >>/v/order; sleep 3600", volumeMounts=[{"name": "v", "mountPath": "/v"}]
    )
    kube.run(pod("p", main, initContainers=init, volumes=[{"name": "v", "emptyDir": {}}]))
    assert kube.sh("p", "cat /v/order").split() == ["one", "side", "two", "main"]
    states = {s["name"]: s["state"] for s in kube.get("p")["status"]["initContainerStatuses"]}
    assert states["one"]["terminated"]["reason"] == "Completed"
    assert "running" in states["side"]


def test_post_start_and_pre_stop_hooks_run(kube: Kube) -> None:
    hooks = {
        "postStart": {"exec": {"command": ["sh", "-c", "echo started >/v/started"]}},
        "preStop": {"exec": {"command": ["sh", "-c", "echo stopping >/v/stopping"]}},
    }
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    watcher = shell("trap 'cat /v/stopping; exit 0' TERM; while true; do sleep 0.1; done", **mount)
    host = {
        "name": "v",
        "hostPath": {
            "path": f"{kube.cluster.folder}/hooks-{kube.namespace}",
            "type": "DirectoryOrCreate",
        },
    }
    kube.run(
        pod(
            "p",
            shell("sleep 3600", lifecycle=hooks, **mount),
            watcher,
            volumes=[host],
            terminationGracePeriodSeconds=10,
        )
    )
    folder = kube.cluster.folder / f"hooks-{kube.namespace}"
    assert (folder / "started").read_text() == "started\n"
    kube("delete", "pod", "p", "--wait=true", "--timeout=60s")
    assert (folder / "stopping").read_text() == "stopping\n"


def test_probes_of_every_kind_work(kube: Kube) -> None:
    web = {
        "image": "nginx",
        "startupProbe": {"tcpSocket": {"port": 80}, "periodSeconds": 1, "failureThreshold": 30},
        "readinessProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 1},
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", "test ! -e /tmp/sick"]},
            "periodSeconds": 1,
            "failureThreshold": 1,
        },
    }
    kube.run(pod("p", web))
    kube.sh("p", "touch /tmp/sick")

    def restarted() -> bool:
        return bool(kube.get("p")["status"]["containerStatuses"][0]["restartCount"] >= 1)

    kube.until(restarted, "a restart by the liveness probe")
    kube.ready("p")
    assert any("Liveness probe failed" in e for e in kube.events())


def test_an_exec_probe_that_times_out_fails(kube: Kube) -> None:
    probe = {
        "exec": {"command": ["sleep", "60"]},
        "periodSeconds": 1,
        "timeoutSeconds": 1,
        "failureThreshold": 1,
    }
    kube.apply(pod("p", shell("sleep 3600", readinessProbe=probe)))
    kube.until(
        lambda: any("Readiness probe failed" in e and "timed out" in e for e in kube.events()),
        "the probe's time-out",
    )
    assert kube.sh("p", "ps | grep -c '[s]leep 60' || true") in ("0", "1")


def test_a_crashing_container_backs_off_with_its_termination_message(kube: Kube) -> None:
    kube.apply(pod("p", shell("echo last words >/dev/termination-log; exit 3")))

    def waiting() -> bool:
        status = kube.get("p")["status"].get("containerStatuses", [{}])[0]
        return bool(status.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff")

    kube.until(waiting, "CrashLoopBackOff", 90)
    last = kube.get("p")["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"], last["message"]) == (3, "Error", "last words\n")


def test_the_termination_message_can_be_the_end_of_the_log(kube: Kube) -> None:
    container = shell("echo from the log; exit 1", terminationMessagePolicy="FallbackToLogsOnError")
    done = kube.finished(pod("p", container, restartPolicy="Never"))
    ended = done["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (1, "from the log\n")


def test_the_error_names_a_missing_command(kube: Kube) -> None:
    kube.apply(pod("p", {"command": ["no-such-command"]}))

    def message() -> str:
        status = kube.get("p")["status"].get("containerStatuses", [{}])[0]
        states: str = json.dumps([status.get("state", {}), status.get("lastState", {})])
        return states if "no-such-command" in states else ""

    assert "executable file not found" in kube.until(message, "the error")


def test_the_error_names_a_missing_image(kube: Kube) -> None:
    kube.apply(pod("p", {"image": "no-such-image", "command": ["true"]}))
    kube.until(
        lambda: any(
            ("no-such-image" in e and "ErrImagePull" in e) or "not found" in e
            for e in kube.events()
        ),
        "the error",
    )


def test_a_pod_is_deleted_within_the_grace_period(kube: Kube) -> None:
    kube.run(
        pod(
            "polite",
            shell("trap 'exit 0' TERM; echo set; while true; do sleep 0.1; done"),
            terminationGracePeriodSeconds=30,
        )
    )
    kube.until(lambda: kube.logs("polite") == "set\n", "the handler of SIGTERM")
    start = time.monotonic()
    kube("delete", "pod", "polite", "--wait=true", "--timeout=60s")
    assert time.monotonic() - start < 25
    kube.run(
        pod(
            "stubborn",
            shell("trap '' TERM; while true; do sleep 0.1; done"),
            terminationGracePeriodSeconds=3,
        )
    )
    start = time.monotonic()
    kube("delete", "pod", "stubborn", "--wait=true", "--timeout=60s")
    assert 2 < time.monotonic() - start < 45


def test_dead_containers_are_collected(kube: Kube) -> None:
    from cri_server.api import api_pb2
    from tests.support import cri

    kube.apply(pod("p", shell("sleep 0.2; exit 1")))
    kube.until(
        lambda: (
            kube.get("p")["status"].get("containerStatuses", [{}])[0].get("restartCount", 0) >= 3
        ),
        "three restarts",
        120,
    )
    uid = kube.get("p")["metadata"]["uid"]
    selector = api_pb2.ContainerFilter(label_selector={"io.kubernetes.pod.uid": uid})
    with cri.connect(kube.cluster.node.socket) as client:
        request = api_pb2.ListContainersRequest(filter=selector)
        kube.until(
            # The last container and one dead before it: kubelet removes the others.
            lambda: len(client.runtime.ListContainers(request).containers) <= 2,
            "garbage collection",
            100,
        )
        kube("delete", "pod", "p", "--wait=true", "--timeout=60s")
        sandboxes = api_pb2.ListPodSandboxRequest(
            filter=api_pb2.PodSandboxFilter(label_selector={"io.kubernetes.pod.uid": uid})
        )
        kube.until(
            lambda: not client.runtime.ListPodSandbox(sandboxes).items,
            "removal of the sandbox",
            150,
        )
        assert not client.runtime.ListContainers(request).containers


def test_the_calls_of_a_pod_belong_to_the_trace_of_kubelet(kube: Kube) -> None:
    kube.run(pod("p", shell("sleep 3600")))
    name = f"{kube.namespace}/p"
    address = f"unix://{kube.cluster.node.socket}"
    command = [
        sys.executable,
        "-m",
        "cri_server.cli.main",
        "--address",
        address,
        "timeline",
        name,
        "--json",
    ]
    calls = json.loads(subprocess.check_output(command, cwd=Path(__file__).parents[2], timeout=60))
    # kubelet traces its work on a pod and sends the trace with each call (W3C trace context).
    parents = {call["call"]: call.get("traceparent", "") for call in calls}
    traces = {
        call: parents[call].split("-")[1]
        for call in ("RunPodSandbox", "CreateContainer", "StartContainer")
    }
    assert len(set(traces.values())) == 1, f"each sync of the pod has one trace: {parents}"
    assert all(parents[call].endswith("-01") for call in traces), "the trace is sampled"
