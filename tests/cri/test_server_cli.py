"""The front end for people, over a real server: manifests, lists, logs, exec, images; and what a wrong manifest is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, REPOSITORY, Server

POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: web, labels: {{app: web}}}}
spec:
  initContainers:
    - {{name: prepare, image: {IMAGE}, command: [sh, -c, "echo prepared > /data/file"], volumeMounts: [{{name: data, mountPath: /data}}]}}
  containers:
    - name: main
      image: {IMAGE}
      command: [sh, -c, "cat /data/file; echo on stderr >&2; exec sleep 3600"]
      env: [{{name: COLOUR, value: blue}}]
      resources: {{limits: {{memory: 64Mi, cpu: 500m}}}}
      volumeMounts: [{{name: data, mountPath: /data, readOnly: true}}]
      livenessProbe: {{exec: {{command: ["true"]}}}}
  volumes:
    - {{name: data, emptyDir: {{}}}}
"""


def cli(server: Server, *words: str, code: int = 0, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `pyrunc-cri` in the server's network namespace (sessions connect to its loopback)."""
    command = [
        *("nsenter", f"--net=/proc/{server.pid}/ns/net", "--", sys.executable, "-m", "cri_server.cli.main"),
        *("--address", f"unix://{server.socket}", *words),
    ]
    done = subprocess.run(command, input=stdin, capture_output=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def run(server: Server, manifest: str, *flags: str, code: int = 0) -> subprocess.CompletedProcess[bytes]:
    path = server.folder / "pod.yaml"
    path.write_text(manifest)
    return cli(server, "run", "--folder", str(server.folder / "pods"), *flags, str(path), code=code)


def test_a_manifest_becomes_a_pod(server: Server) -> None:
    done = run(server, POD)
    output = done.stdout.decode()
    assert "not supported, ignored: spec.containers[0].livenessProbe" in done.stderr.decode()
    (pod,) = server.pods()
    assert server.pod_status(pod.id).network.ip in output and "prepared" in output
    for word in ("shim", "pause", "sleep 3600", "net own", "user host", "start main", " ms  in all"):
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
    assert folder.stat().st_mode & 0o077 == 0, "volumes are writable for everybody"
    cli(server, "rm", "--folder", str(server.folder / "pods"), "web")
    assert not server.pods() and not folder.exists()


def test_rm_deletes_nothing_that_a_pod_names(server: Server) -> None:
    """kubelet copies annotations and labels from whoever may create pods."""
    others = server.folder / "others"
    others.mkdir()
    (others / "precious").touch()
    named = {"pyrunc.cli/folder": str(others)}
    pod = server.run_pod(server.pod_config("others", annotations=named, labels=named))
    cli(server, "rm", "--folder", str(server.folder / "pods"), pod)
    assert not server.pods() and (others / "precious").exists()


def test_exec_with_streams(server: Server) -> None:
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


def test_rm_follows_and_removes(server: Server) -> None:
    manifest = f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: once}}, spec: {{containers: [
  {{name: main, image: "{IMAGE}", command: [sh, -c, "echo one; sleep 0.6; echo two; exit 3"]}}]}}}}
"""
    output = run(server, manifest, "--rm").stdout.decode()
    assert output.rstrip().endswith("two") and not server.pods()
    assert not list((server.folder / "pods").iterdir())


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
        (("kind: Pod", "kind: Deployment"), "kind: "),
        (("name: main", "nome: main"), "spec.containers[0].name: is required"),
        (("value: blue", "value: 5"), "spec.containers[0].env[0].value: expected `str`, got `int`"),
        (("memory: 64Mi", "memory: 64Xi"), "spec.containers[0].resources.limits.memory: '64Xi'"),
        (("{name: data, emptyDir: {}}", "{name: data, nfs: {server: x}}"), "spec.volumes[0]: "),
        (
            ("[{name: data, mountPath: /data, readOnly: true}]", "[{name: other, mountPath: /x}]"),
            "there is no volume",
        ),
        (("command: [sh", "command: ["), "not YAML"),
        (("  containers:", "  kontainers:"), "spec.containers: is required"),
        ((POD, "[1, 2]"), "expected one Pod"),
    ],
)
def test_wrong_manifests(server: Server, change: tuple[str, str], message: str) -> None:
    assert change[0] in POD
    error = run(server, POD.replace(*change), code=1).stderr.decode()
    assert message in error and error.count("\n") == 1, error
    assert not server.pods()


def test_images(server: Server) -> None:
    assert IMAGE in cli(server, "image", "list").stdout.decode()
    archive = server.folder / "busybox.tar"
    assert b"sha256:" in cli(server, "image", "load", str(archive)).stdout
    cli(server, "image", "remove", "no/such:image", code=1)
    assert cli(server, "image", "list", "-q").stdout.count(b"sha256:") == 1


def test_errors_are_one_line(server: Server) -> None:
    assert (
        cli(server, "exec", "nobody", "true", code=1).stderr == b"pyrunc-cri: no such container: 'nobody'\n"
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
    assert "busybox says hello" in output, "the log's line"
    assert "stopped and removed" in output and not list(tmp_path.iterdir())
    assert "--container-runtime-endpoint=unix:///run/pyrunc/cri.sock" in output


def test_verbose_status_is_json(server: Server) -> None:
    container = server.launch(server.run_pod())
    request = api.ContainerStatusRequest(container_id=container, verbose=True)
    info = json.loads(server.runtime.ContainerStatus(request).info["info"])
    assert info["pid"] > 0 and info["runtimeSpec"]["process"]["args"] == ["sleep", "3600"]
    assert "env" not in info["runtimeSpec"]["process"], "environments hold secrets"
