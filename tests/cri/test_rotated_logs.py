"""Tests that the server rotates the logs of pods that `pyrunc-cri run` made, because kubelet does
not know them, and loses no line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cri_server.cli.manifest import check, pod_model
from cri_server.containers.log_rotation import ANNOTATION, RotationLimits, rotated
from cri_server.containers.rotate_logs import INTERVAL_S
from pyrunc.errors import InvalidSpec
from tests.cri.client_verbs import cli, ended, ok, started
from tests.cri.server_harness import IMAGE, Server
from tests.support.processes import wait_until

WRITER = (
    "i=0; while [ $i -lt {number} ]; do i=$((i+1)); echo $i; {pause}; done; touch /done; sleep 3600"
)


def run(server: Server, command: str, limits: str) -> str:
    """Make a pod with `pyrunc-cri run`; return the id of its container."""
    path = server.folder / "pod.yaml"
    path.write_text(f"""
{{apiVersion: v1, kind: Pod, metadata: {{name: talks, annotations: {{{ANNOTATION}: {limits}}}}},
 spec: {{containers: [
  {{name: main, image: "{IMAGE}", command: [sh, -c, "{command}"]}}]}}}}
""")
    cli(server, "run", "--folder", str(server.folder / "pods"), str(path))
    (container,) = server.containers()
    return container.id


def test_rotated_files_are_read_and_followed_like_a_single_log(server: Server) -> None:
    container = run(server, WRITER.format(number=300, pause="usleep 20000"), "2Ki 4")
    path = server.status(container).log_path
    with started(server, "logs", "-f", container) as process:
        assert wait_until(lambda: len(rotated(path)) >= 2, 60), server.tail()
        assert wait_until(lambda: server.exec(container, "test", "-e", "/done").exit_code == 0, 60)
        server.stop_container(container)
        assert process.stdout is not None
        lines = process.stdout.read().decode().splitlines()
        assert ended(process) == (b"", 0)
    assert lines == [str(n) for n in range(1, 301)]
    newest = len(Path(path).read_bytes().splitlines())
    assert ok(server, "logs", "--tail", str(newest + 5), container).lines == lines[-newest - 5 :]
    cli(server, "rm", "--force", "--folder", str(server.folder / "pods"), "talks")
    assert not Path(path).parent.exists(), "rotated files are removed with the pod's folder"


def test_the_configured_number_of_files_is_kept(server: Server) -> None:
    container = run(server, WRITER.format(number=100000, pause="usleep 10000"), "1Ki 2")
    path = server.status(container).log_path
    assert wait_until(lambda: len(rotated(path)) == 1, 60), server.tail()
    (first,) = rotated(path)
    assert wait_until(lambda: not Path(first).exists(), 10 * INTERVAL_S + 30), server.tail()
    assert wait_until(lambda: len(rotated(path)) == 1, 60), server.tail()


def test_a_rotation_that_a_kill_interrupted_is_completed(server: Server) -> None:
    container = run(
        server, "echo one; until [ -e /go ]; do sleep 0.05; done; echo two; sleep 3600", "1Mi 2"
    )
    path = Path(server.status(container).log_path)
    server.wait_logged(container, "one")
    path.rename(f"{path}.20260101-100000")
    assert wait_until(path.exists, 60), server.tail()
    server.exec(container, "touch", "/go")
    server.wait_logged(container, "two")
    assert ok(server, "logs", container).lines == ["one", "two"]


def test_the_author_of_a_kubelets_pod_cannot_ask_for_rotation(server: Server) -> None:
    """Only an annotation of the container asks for rotation; the same annotation of its pod does
    not."""
    # kubelet copies a pod's annotations to the sandbox alone.
    pod = server.run_pod(server.pod_config("author", annotations={ANNOTATION: "1 2"}))
    other = server.launch(pod, server.container_config(["sh", "-c", "echo one; sleep 3600"]))
    server.wait_logged(other, "one")
    config = server.container_config(["sh", "-c", "echo one; sleep 3600"], log_path="d.log")
    config.metadata.name, config.annotations[ANNOTATION] = "d", "1 2"
    own = server.launch(pod, config)
    assert wait_until(lambda: rotated(server.status(own).log_path), 60), server.tail()
    assert not rotated(server.status(other).log_path), "one check handles the containers in order"


@pytest.mark.parametrize("text", ["10Mi", "10Mi 1", "x 5", "10Mi five"])
def test_invalid_log_limits_are_refused_with_the_annotations_name(text: str) -> None:
    metadata = pod_model.Metadata(name="a", annotations={ANNOTATION: text})
    with pytest.raises(InvalidSpec, match=r"metadata.annotations\[io.pyrunc.log-rotation\]"):
        check.log_limits(metadata)


def test_limits_are_kubelets_unless_an_annotation_sets_them() -> None:
    assert check.log_limits(pod_model.Metadata(name="a")) == RotationLimits(10 << 20, 5)
    metadata = pod_model.Metadata(name="a", annotations={ANNOTATION: "1Mi 3"})
    assert check.log_limits(metadata) == RotationLimits(1 << 20, 3)
