"""Tests `restart` and `start` for running and ended containers and for stopped pods, and their
errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.client_verbs import call, ok
from tests.cri.server_harness import IMAGE, Server

MANIFEST = f"""
apiVersion: v1
kind: Pod
metadata: {{name: web, annotations: {{team: blue}}}}
spec:
  volumes: [{{name: data, emptyDir: {{}}}}]
  initContainers:
    - name: prepare
      image: {IMAGE}
      command: [sh, -c, "echo prepared >> /data/file"]
      volumeMounts: [{{name: data, mountPath: /data}}]
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "cat /data/file; exec sleep 3600"]
      volumeMounts: [{{name: data, mountPath: /data}}]
    - {{name: once, image: {IMAGE}, command: [sh, -c, "echo done; exit 3"]}}
"""


@pytest.fixture(autouse=True)
def no_folders(module_server: Server) -> Iterator[None]:
    """Remove the folders of `run` after each test."""
    yield
    shutil.rmtree(module_server.folder / "pods", ignore_errors=True)


def folder(server: Server) -> str:
    return str(server.folder / "pods")


def states(server: Server) -> dict[str, tuple[int, int]]:
    """Return (attempt, state) of the newest attempt of each container, by name."""
    containers = sorted(server.containers(), key=lambda c: c.metadata.attempt)
    return {c.metadata.name: (c.metadata.attempt, c.state) for c in containers}


def run_web(server: Server) -> str:
    """Make a pod with `run`; return its id."""
    manifest = server.folder / "web.yaml"
    manifest.write_text(MANIFEST)
    ok(server, "run", "--folder", folder(server), str(manifest))
    (pod,) = server.pods()
    return pod.id


def test_restart_starts_an_ended_container(server: Server) -> None:
    run_web(server)
    for attempt, verb in enumerate(("restart", "start")):
        attempts = [c for c in server.containers() if c.metadata.name == "once"]
        server.wait_exit(max(attempts, key=lambda c: c.metadata.attempt).id)
        ok(server, verb, "web/once")
        assert states(server)["once"][0] == attempt + 1


def test_restart_of_a_pod_restarts_all_containers_except_init_containers(server: Server) -> None:
    run_web(server)
    ok(server, "restart", "-t", "0", "web")
    attempts = {name: attempt for name, (attempt, _) in states(server).items()}
    assert attempts == {"prepare": 0, "main": 1, "once": 1}


def test_a_stopped_pod_starts_again_with_its_volumes(server: Server) -> None:
    for verb in ("restart", "start"):
        before = run_web(server)
        ok(server, "stop", "-t", "0", "web")
        ok(server, verb, "--folder", folder(server), "web")
        (pod,) = server.pods()
        assert pod.id != before and pod.state == api.SANDBOX_READY, verb
        assert pod.metadata.attempt == 1 and pod.annotations["team"] == "blue"
        assert states(server)["main"] == (1, api.CONTAINER_RUNNING)
        (main,) = (c.id for c in server.containers() if c.metadata.name == "main")
        server.wait_logged(main, "prepared")
        assert server.log_lines(main) == [
            "prepared",
            "prepared",
        ], "the volume remains, the init container runs again"
        ok(server, "rm", "-f", "--folder", folder(server), "web")
        assert not list(Path(folder(server)).iterdir()), "rm finds the folder of the new attempt"


def test_a_failed_pod_restart_changes_nothing(server: Server, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    before = server.run_pod(server.pod_config("web"))
    mount = api.Mount(container_path="/x", host_path=str(source))
    server.launch(before, server.container_config(mounts=[mount]))
    server.stop_pod(before)
    source.rmdir()
    source.symlink_to("/nowhere/at/all")
    assert call(server, "start", "web").code == 1
    assert [(p.id, p.state) for p in server.pods()] == [(before, api.SANDBOX_NOTREADY)]


def test_a_pod_without_containers_can_be_restarted(server: Server) -> None:
    before = server.run_pod(server.pod_config("bare"))
    assert call(server, "restart", "bare").error == "pod default/bare has no containers"
    server.stop_pod(before)
    ok(server, "start", "bare")
    assert [p.state for p in server.pods()] == [api.SANDBOX_READY]


def test_the_error_of_start_gives_the_reason(server: Server) -> None:
    pod = server.run_pod(server.pod_config("web"))
    created = server.create(pod)
    ok(server, "start", "c")
    assert server.status(created).state == api.CONTAINER_RUNNING
    assert call(server, "start", "c").error == "container c is running already"
    assert (
        call(server, "start", "web").error
        == "pod default/web and its containers are running already"
    )
    server.stop_pod(pod)
    for verb in ("start", "restart"):
        assert (
            call(server, verb, "c").error
            == "container c: its pod default/web is stopped; pyrunc-cri start default/web starts"
            " both"
        )
    kubelets = server.run_pod(server.pod_config("node", labels={"io.kubernetes.pod.uid": "u"}))
    server.launch(kubelets, server.container_config(["true"]))
    (container,) = server.containers(pod_sandbox_id=kubelets)
    server.wait_exit(container.id)
    error = "node is not running and belongs to kubelet, which starts it"
    assert call(server, "restart", "-f", "node").error == error
    error = "node belongs to kubelet, so only kubelet may start it"
    assert call(server, "start", "node").error == error


def test_stop_uses_the_manifests_grace_period(server: Server) -> None:
    """Like kubelet, `run` stores the pod's terminationGracePeriodSeconds in an annotation of its
    containers, which `stop` reads."""
    manifest = server.folder / "web.yaml"
    deaf = "trap '' TERM; echo up; while :; do sleep 0.02; done"
    manifest.write_text(
        f"{{apiVersion: v1, kind: Pod, metadata: {{name: web}}, spec:"
        f" {{terminationGracePeriodSeconds: 0, "
        f'containers: [{{name: c, image: "{IMAGE}", command: [sh, -c, "{deaf}"]}}]}}}}'
    )
    ok(server, "run", "--folder", folder(server), str(manifest))
    (container,) = server.containers()
    assert container.annotations["io.kubernetes.pod.terminationGracePeriod"] == "0"
    # the default would be ten seconds for a container that ignores SIGTERM
    ok(server, "stop", "web/c")
    took_ns = server.status(container.id).finished_at - server.status(container.id).started_at
    assert server.status(container.id).exit_code == 137 and took_ns < 9_000_000_000
    ok(server, "rm", "-f", "--folder", folder(server), "web")


def test_a_restarted_pod_has_its_hostname_and_its_new_address(server: Server) -> None:
    """/etc/hosts, the environment and the arguments have the new address (status.podIP), and
    /etc/hosts keeps the hostAliases."""
    manifest = server.folder / "web.yaml"
    manifest.write_text(f"""
apiVersion: v1
kind: Pod
metadata: {{name: web}}
spec:
  hostAliases: [{{ip: 192.0.2.7, hostnames: [db.test, db]}}]
  containers:
    - name: c
      image: {IMAGE}
      env: [{{name: IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}]
      command: [sh, -c, "echo $IP $0; exec sleep 3600", "arg-$(IP)"]
""")
    ok(server, "run", "--folder", folder(server), str(manifest))
    addresses = []
    for attempt in range(2):
        (pod,) = server.pods()
        address = server.pod_status(pod.id).network.ip
        (container,) = server.containers()
        server.wait_logged(container.id, f"{address} arg-{address}")
        hosts = server.output(container.id, "cat", "/etc/hosts").splitlines()
        assert f"{address}\tweb" in hosts and "192.0.2.7\tdb.test db" in hosts
        assert (
            "127.0.0.1\tlocalhost" in hosts and sum(line.endswith("\tweb") for line in hosts) == 1
        )
        addresses.append(address)
        if not attempt:
            ok(server, "stop", "-t", "0", "web")
            ok(server, "start", "--folder", folder(server), "web")
    assert addresses[0] != addresses[1]


def test_an_error_names_the_file_or_the_container(server: Server) -> None:
    manifest = server.folder / "web.yaml"
    manifest.write_text(MANIFEST.replace("kind: Pod", "kind: Service"))
    assert call(server, "run", str(manifest)).error.startswith(
        f"{manifest}: kind: run supports only Pod"
    )
    manifest.write_text(MANIFEST.replace('[sh, -c, "echo done; exit 3"]', "[/no/such]"))
    error = call(server, "run", "--folder", folder(server), str(manifest)).error
    assert "container once" in error and "/no/such" in error
    assert not server.pods()


def test_a_host_port_error_names_the_pod_and_the_timeline_names_the_image(
    server: Server,
) -> None:
    manifest = server.folder / "web.yaml"
    text = MANIFEST.replace(
        "- name: main", "- name: main\n      ports: [{containerPort: 80, hostPort: 8088}]"
    )
    manifest.write_text(text)
    ok(server, "run", "--folder", folder(server), str(manifest))
    manifest.write_text(text.replace("{name: web,", "{name: other,"))
    error = call(server, "run", "--folder", folder(server), str(manifest)).error
    assert "host port 8088/tcp is already taken by" in error and "is pod default/web)" in error
    calls = ok(server, "timeline", "--json", "web").json
    images = {each["image"] for each in calls if each["call"] == "CreateContainer"}
    assert images == {IMAGE}
