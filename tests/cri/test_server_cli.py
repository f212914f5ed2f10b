"""Tests the client's commands with a real server: manifests, lists, logs, exec, images; and errors
in manifests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cri_server.api import api_pb2 as api
from cri_server.cli.connection.client import Client
from cri_server.cli.manifest import volumes
from cri_server.cli.manifest.read import parse
from cri_server.cli.pods import run as pod_run
from pyrunc.errors import Error
from tests.cri.client_verbs import cli, ended, started
from tests.cri.server_harness import IMAGE, REPOSITORY, Server
from tests.support.processes import wait_until

POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: web, labels: {{app: web}}}}
spec:
  initContainers:
    - {{name: prepare, image: {IMAGE}, command: [sh, -c, "echo prepared > /data/file"],
       volumeMounts: [{{name: data, mountPath: /data}}]}}
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "cat /data/file; echo on stderr >&2; exec sleep 3600"]
      env: [{{name: COLOUR, value: blue}}]
      resources: {{limits: {{memory: 64Mi, cpu: 500m}}}}
      volumeMounts: [{{name: data, mountPath: /data, readOnly: true}}]
  volumes:
    - {{name: data, emptyDir: {{}}}}
"""


def run(
    server: Server, manifest: str, *flags: str, code: int = 0
) -> subprocess.CompletedProcess[bytes]:
    path = server.folder / "pod.yaml"
    path.write_text(manifest)
    return cli(server, "run", "--folder", str(server.folder / "pods"), *flags, str(path), code=code)


@pytest.fixture(autouse=True)
def no_folders(module_server: Server) -> Iterator[None]:
    """Remove the folders of pods after each test."""
    yield
    shutil.rmtree(module_server.folder / "pods", ignore_errors=True)


def test_a_manifest_becomes_a_pod(server: Server) -> None:
    done = run(server, POD)
    output = done.stdout.decode()
    (pod,) = server.pods()
    assert server.pod_status(pod.id).network.ip in output and "prepared" in output
    for word in (
        "shim",
        "pause",
        "sleep 3600",
        "net own",
        "user host",
        "start main",
        " ms  in all",
    ):
        assert word in output, word
    assert "web" in cli(server, "pods").stdout.decode()
    listing = cli(server, "ps").stdout.decode()
    assert "main" in listing and "prepare" not in listing
    assert "prepare" in cli(server, "ps", "-a").stdout.decode()
    main = next(c for c in server.containers(pod_sandbox_id=pod.id) if c.metadata.name == "main")
    server.wait_logged(main.id, "on stderr")
    logs = cli(server, "logs", "web/main")
    assert (logs.stdout, logs.stderr) == (b"prepared\n", b"on stderr\n")
    assert cli(server, "exec", "main", "sh", "-c", "echo $COLOUR").stdout == b"blue\n"
    cli(server, "exec", "main", "touch", "/data/new", code=1)
    cli(server, "stop", "-t", "0", "web")
    (folder,) = (server.folder / "pods").iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "volumes are writable for all users"
    cli(server, "rm", "--folder", str(server.folder / "pods"), "web")
    assert not server.pods() and not folder.exists()


def test_rm_deletes_nothing_that_a_pod_names(server: Server) -> None:
    """`rm` does not trust a pod's annotations and labels, because kubelet copies them from users
    who may create pods."""
    others = server.folder / "others"
    others.mkdir()
    (others / "precious").touch()
    named = {"pyrunc.cli/folder": str(others)}
    pod = server.run_pod(server.pod_config("others", annotations=named, labels=named))
    cli(server, "rm", "--folder", str(server.folder / "pods"), pod)
    assert not server.pods() and (others / "precious").exists()


def with_volume(volume: str, mount: str = "mountPath: /v", command: str = "sleep 3600") -> str:
    """Return the manifest of a pod with one volume and one mount of it."""
    return f"""
apiVersion: v1
kind: Pod
metadata: {{name: volumes}}
spec:
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "{command}"]
      env: [{{name: A, value: one}}, {{name: B, value: "$(A)/two"}}]
      volumeMounts: [{{name: v, {mount}}}]
  volumes: [{{name: v, {volume}}}]
"""


def test_a_host_path_is_checked_before_anything_runs(server: Server, tmp_path: Path) -> None:
    missing = with_volume(f"hostPath: {{path: {tmp_path}/missing, type: Directory}}")
    error = run(server, missing, code=1).stderr.decode()
    assert f"'{tmp_path}/missing' does not exist; type Directory requires it" in error
    assert not server.pods() and not list((server.folder / "pods").iterdir())
    run(server, missing.replace("type: Directory", 'type: ""'))
    assert (tmp_path / "missing").is_dir(), "a host path without a type is created"


def test_a_sub_path_is_resolved_beneath_its_volume(server: Server, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "out").symlink_to("..")
    for mount, problem in (
        ("../x", "contains '..'"),
        ("/x", "is not relative"),
        ("out/x", "through a symbolic link"),
    ):
        pod = with_volume(
            f"hostPath: {{path: {tmp_path}/volume}}", f"mountPath: /v, subPath: {mount}"
        )
        assert problem in run(server, pod, code=1).stderr.decode() and not server.pods()
    assert os.listdir(tmp_path) == ["volume"]
    mount = 'mountPath: /v, subPathExpr: "inner/$(B)"'
    run(
        server,
        with_volume(f"hostPath: {{path: {tmp_path}/volume}}", mount, "touch /v/made; sleep 3600"),
    )
    assert wait_until(lambda: (tmp_path / "volume" / "inner" / "one" / "two" / "made").exists(), 20)


def test_a_sub_path_that_is_replaced_by_a_link_starts_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pod stays if the sub path is replaced after the client has resolved it and before the
    server does."""
    resolve, volume = volumes.source, tmp_path / "volume"
    volume.mkdir()

    def resolve_and_replace(*arguments: Any) -> str:
        path = resolve(*arguments)
        Path(path).rmdir()
        Path(path).symlink_to("/etc")
        return path

    monkeypatch.setattr(volumes, "source", resolve_and_replace)
    pod, _ = parse(with_volume(f"hostPath: {{path: {volume}}}", "mountPath: /v, subPath: x"))
    with (
        Client(f"unix://{server.socket}") as client,
        pytest.raises(Error, match="the source of /v, was replaced by a symbolic link"),
    ):
        pod_run.start(client, pod, server.folder / "pods")
    assert not server.pods()


def test_a_sub_path_expression_needs_its_variables(server: Server, tmp_path: Path) -> None:
    for mount, problem in (
        ('subPathExpr: "$(NOT)"', "'NOT' is not in the environment"),
        ('subPathExpr: "$(A)", subPath: a', "both subPath and subPathExpr"),
        ('subPathExpr: "$(UP)/x"', "contains '..'"),
    ):
        pod = with_volume(f"hostPath: {{path: {tmp_path}}}", f"mountPath: /v, {mount}")
        pod = pod.replace("name: A, value: one", "name: UP, value: ..") if "UP" in mount else pod
        assert problem in run(server, pod, code=1).stderr.decode() and not server.pods()


def test_references_to_the_environment_are_expanded(server: Server) -> None:
    pod = with_volume("emptyDir: {}", command="echo '$(B) $$(B) $(NOT)'")
    run(server, pod)
    (container,) = server.containers()
    assert wait_until(lambda: server.log_lines(container.id) == ["one/two $(B) $(NOT)"], 20)


def test_exec_passes_streams_and_exit_code(server: Server) -> None:
    container = server.launch(server.run_pod())
    done = cli(
        server,
        "exec",
        "-i",
        container,
        "sh",
        "-c",
        "cat; echo err >&2; exit 7",
        stdin=b"in\n" * 50_000,
        code=7,
    )
    assert (done.stdout, done.stderr) == (b"in\n" * 50_000, b"err\n")
    terminal = cli(server, "exec", "-t", container, "sh", "-c", "tty; exit 3", code=3)
    assert terminal.stdout.startswith(b"/dev/pts/")


def test_exec_shows_all_of_a_large_output(server: Server) -> None:
    container = server.launch(server.run_pod())
    command = "head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2; exit 9"
    done = cli(server, "exec", container, "sh", "-c", command, code=9)
    assert (len(done.stdout), len(done.stderr)) == (20_000_000, 3_000_000)


def test_exec_shows_output_at_once(server: Server) -> None:
    container = server.launch(server.run_pod())
    waiting = "echo first; until [ -e /go ]; do sleep 0.05; done; echo last"
    with started(server, "exec", container, "sh", "-c", waiting) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n", "the output arrives only at the end"
        server.output(container, "touch", "/go")
        assert process.stdout.read() == b"last\n" and process.wait() == 0


@pytest.mark.parametrize("words", [("exec", "c", "yes"), ("logs", "c"), ("logs", "-f", "c")])
def test_a_closed_pipe_ends_the_command_quietly(server: Server, words: tuple[str, ...]) -> None:
    container = server.launch(
        server.run_pod(), server.container_config(["sh", "-c", "yes | head -n 300000; sleep 3600"])
    )
    assert wait_until(lambda: len(server.log_lines(container)) == 300_000, 30)
    with started(server, *words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert ended(process) == (b"", 128 + signal.SIGPIPE)
    assert wait_until(lambda: "yes" not in server.output(container, "ps", "-o", "args"), 20)


def test_an_interrupt_ends_exec_and_its_command(server: Server) -> None:
    container = server.launch(server.run_pod())
    command = ("exec", container, "sh", "-c", "echo up; exec sleep 1234")
    with started(server, *command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert ended(process) == (b"", 128 + signal.SIGINT)
    assert wait_until(lambda: "1234" not in server.output(container, "ps", "-o", "args"), 20)


def test_output_that_cannot_be_written_is_an_error(server: Server) -> None:
    container = server.launch(server.run_pod())
    for arguments in (("exec", container, "echo", "x"), ("ps",)):
        with (
            open("/dev/full", "wb") as full,
            started(server, *arguments, stdout=full) as process,
        ):
            assert ended(process) == (b"pyrunc-cri: no space left on device\n", 1)


def test_logs_follow_a_rotated_file(server: Server) -> None:
    container = server.launch(
        server.run_pod(),
        server.container_config(
            ["sh", "-c", "echo one; until [ -e /go ]; do sleep 0.05; done; echo two"]
        ),
    )
    server.wait_logged(container, "one")
    with started(server, "logs", "-f", container) as process:
        assert process.stdout is not None and process.stdout.readline() == b"one\n"
        path = Path(server.status(container).log_path)
        path.rename(f"{path}.1")
        server.runtime.ReopenContainerLog(api.ReopenContainerLogRequest(container_id=container))
        server.output(container, "touch", "/go")
        assert process.stdout.read() == b"two\n" and process.wait() == 0


def test_rm_follows_and_removes(server: Server) -> None:
    manifest = f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: once}}, spec: {{containers: [
  {{name: main, image: "{IMAGE}", command: [sh, -c, "echo one; sleep 0.6; echo two; exit 3"]}}]}}}}
"""
    output = run(server, manifest, "--rm", code=3).stdout.decode()
    assert output.rstrip().endswith("two") and not server.pods()
    assert not list((server.folder / "pods").iterdir())


def test_rm_shows_all_containers_at_a_time_and_returns_the_first_failure(server: Server) -> None:
    path = server.folder / "pod.yaml"
    path.write_text(f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: several}}, spec: {{containers: [
  {{name: a, image: "{IMAGE}",
   command: [sh, -c, "until [ -e /go ]; do sleep 0.05; done; echo from a"]}},
  {{name: b, image: "{IMAGE}",
   command: [sh, -c, "until [ -e /go ]; do sleep 0.05; done; echo from b; exit 4"]}},
  {{name: c, image: "{IMAGE}", command: [sh, -c, "exit 5"]}}]}}}}
""")
    with started(
        server, "run", "--rm", "--folder", str(server.folder / "pods"), str(path)
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(b"--- output"):
            assert process.poll() is None
        for name in ("b", "a"):
            (container,) = (c for c in server.containers() if c.metadata.name == name)
            server.output(container.id, "touch", "/go")
            assert process.stdout.readline() == f"from {name}\n".encode()
        assert ended(process) == (b"", 4) and not server.pods()


def test_an_interrupt_of_run_removes_the_pod(server: Server) -> None:
    path = server.folder / "pod.yaml"
    path.write_text(POD.replace("spec:", "spec:\n  terminationGracePeriodSeconds: 0"))
    with started(
        server, "run", "--rm", "--folder", str(server.folder / "pods"), str(path)
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith(b"--- output"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        output, code = ended(process)
        assert code == 128 + signal.SIGINT
        assert output in (b"", b"on stderr\n"), "only the command's own output may be there"
    assert not server.pods() and not list((server.folder / "pods").iterdir())


def test_an_init_container_that_fails_ends_the_pod(server: Server) -> None:
    manifest = f"""
apiVersion: v1
kind: Pod
metadata: {{name: bad}}
spec:
  initContainers: [{{name: first, image: "{IMAGE}", command: [sh, -c, "echo because; exit 4"]}}]
  containers: [{{name: main, image: "{IMAGE}"}}]
"""
    error = run(server, manifest, code=1).stderr.decode()
    assert "first exited with code 4" in error and "because" in error and not server.pods()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('command: [sh, -c, "cat', 'comand: [sh, -c, "cat'),
            "spec.containers[0].comand: no such field; did you mean 'command'?",
        ),
        (
            ("name: main", "nome: main"),
            "spec.containers[0].nome: no such field; did you mean 'name'?",
        ),
        (("value: blue", "value: 5"), "spec.containers[0].env[0].value: expected `str`, got `int`"),
        (("kind: Pod", "kind: Deployment"), "kind: run supports only Pod, not Deployment"),
    ],
)
def test_an_invalid_manifest_is_refused_with_its_reason(
    server: Server, change: tuple[str, str], message: str
) -> None:
    assert change[0] in POD
    error = run(server, POD.replace(*change), code=1).stderr.decode()
    assert message in error and error.count("\n") == 1, error
    assert not server.pods()


def test_lenient_ignores_with_a_warning(server: Server) -> None:
    manifest = POD.replace(
        "name: main\n", "name: main\n      livenessProbe: {}\n      comand: [x]\n"
    )
    assert manifest != POD
    warnings = run(server, manifest, "--lenient").stderr.decode().splitlines()
    assert warnings == [
        (
            "pyrunc-cri: warning: ignored spec.containers[0].livenessProbe: a probe every 10 s: run"
            " does not probe"
        ),
        (
            "pyrunc-cri: warning: ignored spec.containers[0].comand: no such field; did you mean"
            " 'command'?"
        ),
    ]
    assert len(server.containers()) == 2


def test_a_pod_name_cannot_be_used_twice(server: Server) -> None:
    run(server, POD)
    (pod,) = server.pods()
    refused = (
        f"pyrunc-cri: pod default/web exists: {pod.id[:12]}, ready (pyrunc-cri rm -f {pod.id[:12]}"
        " removes it)\n"
    )
    assert run(server, POD, code=1).stderr.decode() == refused
    cli(server, "stop", "-t", "0", "web")
    assert run(server, POD, code=1).stderr.decode() == refused.replace(
        ", ready", ", not ready"
    ).replace("-f ", "")
    run(server, POD.replace("{name: web,", "{name: web, namespace: other,"))
    assert len(server.pods()) == 2 and len(list((server.folder / "pods").iterdir())) == 2


def test_two_concurrent_runs_create_a_single_pod(server: Server) -> None:
    path = server.folder / "pod.yaml"
    path.write_text(POD)
    arguments = ("run", "--folder", str(server.folder / "pods"), str(path))
    with started(server, *arguments) as one, started(server, *arguments) as two:
        codes = {
            process.communicate()[1].count(b"default/web exists"): process.wait()
            for process in (one, two)
        }
    assert codes == {0: 0, 1: 1} and len(server.pods()) == 1
    assert len(list((server.folder / "pods").iterdir())) == 1


def test_a_container_runs_as_the_user_of_its_manifest(server: Server) -> None:
    manifest = f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: user}},
 spec: {{securityContext: {{runAsGroup: 33, runAsNonRoot: true}}, containers: [
  {{name: main, image: "{IMAGE}", command: [id], securityContext: {{runAsUser: 1000}}}}]}}}}
"""
    assert "uid=1000 gid=33" in run(server, manifest, "--rm").stdout.decode()
    error = run(server, manifest.replace("runAsUser: 1000", "runAsUser: 0"), code=1).stderr.decode()
    assert "runAsNonRoot: container main would run as root" in error and not server.pods()


def test_image_lists_loads_and_removes_images(server: Server) -> None:
    assert IMAGE in cli(server, "image", "list").stdout.decode()
    archive = server.folder / "busybox.tar"
    assert b"sha256:" in cli(server, "image", "load", str(archive)).stdout
    cli(server, "image", "remove", "no/such:image", code=1)
    assert cli(server, "image", "list", "-q").stdout.count(b"sha256:") == 1


def test_an_error_is_a_single_line(server: Server) -> None:
    assert (
        cli(server, "exec", "nobody", "true", code=1).stderr
        == b"pyrunc-cri: no such container: 'nobody'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cri_server.cli.main", "--address", "unix:///nowhere.sock", "ps"],
        capture_output=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 1 and b"no server at unix:///nowhere.sock" in done.stderr
    assert b"Traceback" not in done.stderr


def test_the_demo_shows_a_pod_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "cri_server.cli.main", "demo", str(REPOSITORY / "pod.yaml")],
        capture_output=True, cwd=REPOSITORY, env=environment, timeout=60,
    )  # fmt: skip
    output = done.stdout.decode()
    assert done.returncode == 0, (output, done.stderr)
    assert "10.88." in output and "sleep 3600" in output and "uid=0(root)" in output
    assert "busybox says hello" in output, "the line of the container's log"
    assert "stopped and removed" in output and not list(tmp_path.iterdir())
    assert "--container-runtime-endpoint=unix:///run/pyrunc/cri.sock" in output


def test_verbose_status_is_json(server: Server) -> None:
    container = server.launch(server.run_pod())
    request = api.ContainerStatusRequest(container_id=container, verbose=True)
    info = json.loads(server.runtime.ContainerStatus(request).info["info"])
    assert info["pid"] > 0 and info["runtimeSpec"]["process"]["args"] == ["sleep", "3600"]
    assert "env" not in info["runtimeSpec"]["process"], "environments hold secrets"


def test_run_provides_config_maps_and_secrets(server: Server) -> None:
    """ConfigMap and Secret are in another file than the pod. Variables, files, their modes and
    read-only mounts are as with kubelet."""
    objects = server.folder / "objects.yaml"
    objects.write_text("""
{apiVersion: v1, kind: ConfigMap, metadata: {name: settings},
 data: {COLOUR: blue, page: "hello\\n"}}
---
{apiVersion: v1, kind: Secret, metadata: {name: keys}, stringData: {password: "pa$(COLOUR)"}}
""")
    path = server.folder / "pod.yaml"
    path.write_text(f"""
apiVersion: v1
kind: Pod
metadata: {{name: configured}}
spec:
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "echo $COLOUR $PASSWORD; cat /etc/page/index;
        stat -c %a /etc/keys/password; touch /etc/keys/x || echo read-only"]
      envFrom: [{{configMapRef: {{name: settings}}}}]
      env: [{{name: PASSWORD, valueFrom: {{secretKeyRef: {{name: keys, key: password}}}}}}]
      livenessProbe: {{tcpSocket: {{port: 80}}}}
      volumeMounts: [{{name: page, mountPath: /etc/page}}, {{name: keys, mountPath: /etc/keys}}]
  volumes:
    - {{name: page, configMap: {{name: settings, items: [{{key: page, path: index}}]}}}}
    - {{name: keys, secret: {{secretName: keys, defaultMode: 0440}}}}
""")
    arguments = ("run", "--rm", "--folder", str(server.folder / "pods"), str(path), str(objects))
    done = cli(server, *arguments)
    output = done.stdout.decode().split("--- output")[1].splitlines()[1:]
    assert output == ["blue pa$(COLOUR)", "hello", "440", "read-only"]
    assert b"livenessProbe: tcpSocket :80 every 10 s: run does not probe" in done.stderr


def test_a_sidecar_runs_beside_the_other_containers_and_ends_last(server: Server) -> None:
    loop = "trap 'echo sidecar ends; exit 0' TERM; echo sidecar up; while :; do sleep 0.05; done"
    manifest = f"""
apiVersion: v1
kind: Pod
metadata: {{name: mesh}}
spec:
  terminationGracePeriodSeconds: 5
  initContainers:
    - {{name: side, image: "{IMAGE}", restartPolicy: Always, command: [sh, -c, "{loop}"]}}
    - {{name: prepare, image: "{IMAGE}", command: ["true"]}}
  containers:
    - {{name: main, image: "{IMAGE}", command: [sh, -c, "sleep 0.5; echo main; exit 3"]}}
"""
    done = run(server, manifest, "--rm", code=3)
    assert "main" in done.stdout.decode().split("--- output")[1] and not server.pods()
    run(server, manifest)
    side = next(c for c in server.containers() if c.metadata.name == "side")
    main = next(c for c in server.containers() if c.metadata.name == "main")
    server.wait_logged(side.id, "sidecar up")
    server.wait_exit(main.id)
    cli(server, "stop", "-t", "5", "mesh")
    assert server.status(side.id).exit_code == 0 and "sidecar ends" in server.log_lines(side.id)
