"""Tests a plugin built with NRI's own Go module: it connects to the socket, or the server starts it
from the plugin folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cri_server.api import api_pb2 as cri
from tests.cri.server_harness import Server
from tests.support.nri_go import build
from tests.support.processes import wait_until

LIFE = [
    "RunPodSandbox {pod} ",
    "CreateContainer {pod} c",
    "PostCreateContainer {pod} c",
    "StartContainer {pod} c",
    "PostStartContainer {pod} c",
    "UpdateContainer {pod} c",
    "PostUpdateContainer {pod} c",
    "StopContainer {pod} c",
    "StopPodSandbox {pod} ",
    "RemoveContainer {pod} c",
    "RemovePodSandbox {pod} ",
]


class GoPlugin:
    """A running Go plugin, and the lines that it has printed."""

    def __init__(self, version: str, where: Path, output: Path) -> None:
        self._output = output
        command = [build.plugin(version), "-socket", where, "-name", "go", "-index", "07"]
        with open(output, "wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)

    def lines(self) -> list[str]:
        return [
            line for line in self._output.read_text().splitlines() if not line.startswith("time=")
        ]

    def wait_for(self, beginning: str) -> str:
        """Wait for a line that begins with `beginning`; return the first."""
        assert wait_until(lambda: any(line.startswith(beginning) for line in self.lines()), 60), (
            self.lines()
        )
        return next(line for line in self.lines() if line.startswith(beginning))

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


@pytest.fixture(params=[build.NEW, build.OLD])
def plugin(
    request: pytest.FixtureRequest, server: Server, nri_socket: Path, tmp_path: Path
) -> Iterator[GoPlugin]:
    running = GoPlugin(request.param, nri_socket, tmp_path / "lines")
    try:
        yield running
    finally:
        running.end()


def test_a_go_plugin_gets_events_and_adjusts(server: Server, plugin: GoPlugin) -> None:
    plugin.wait_for("Synchronize 0 0")
    assert plugin.wait_for("Configure").split()[1] == "pyrunc"
    wishes = {"test/device": "/dev/kmsg", "test/nofile": "321", "test/env": "BY=go"}
    config = server.pod_config(annotations=wishes)
    pod = server.run_pod(config)
    container = server.launch(pod)
    assert server.output(container, "sh", "-c", "echo $BY; ulimit -n") == "go\n321\n"
    assert server.output(container, "stat", "-c", "%t %T", "/dev/kmsg") == _numbers("/dev/kmsg")
    resources = cri.LinuxContainerResources(cpu_shares=500)
    request = cri.UpdateContainerResourcesRequest(container_id=container, linux=resources)
    server.runtime.UpdateContainerResources(request, timeout=30)
    assert server.status(container).resources.linux.cpu_shares == 501
    server.stop_pod(pod)
    server.remove_pod(pod)
    plugin.wait_for("RemovePodSandbox")
    assert plugin.lines()[2:] == [line.format(pod=config.metadata.name) for line in LIFE]


def _numbers(path: str) -> str:
    device = os.stat(path).st_rdev
    return f"{os.major(device):x} {os.minor(device):x}\n"


def test_large_messages_are_sent_and_received(server: Server, plugin: GoPlugin) -> None:
    plugin.wait_for("Synchronize")
    # larger than every buffer on the way to the plugin, which returns it as an adjustment
    text = "x" * 100_000
    pod = server.run_pod(server.pod_config(annotations={"test/env": f"BIG={text}"}))
    config = server.container_config(annotations={"more": "y" * 200_000})
    container = server.launch(pod, config)
    assert server.output(container, "sh", "-c", "echo ${#BIG}") == "100000\n"
    assert plugin.wait_for("PostStartContainer")


def test_a_refusal_is_an_error_with_its_message(server: Server, plugin: GoPlugin) -> None:
    plugin.wait_for("Synchronize")
    pod = server.run_pod(server.pod_config(annotations={"test/device": "/dev/there-is-none"}))
    with pytest.raises(
        grpc.RpcError,
        match=r"NRI plugin 07-go: CreateContainer: .*/dev/there-is-none: no such file",
    ):
        server.create(pod)
    assert not server.containers()


def test_a_plugin_is_synchronized_with_many_containers(
    server: Server, nri_socket: Path, tmp_path: Path
) -> None:
    pod = server.run_pod()
    for number in range(5):
        metadata = cri.ContainerMetadata(name=f"c{number}")
        server.create(
            pod, server.container_config(metadata=metadata, annotations={"a": "z" * 60_000})
        )
    late = GoPlugin(build.NEW, nri_socket, tmp_path / "late")
    try:
        late.wait_for("Synchronize 1 5")
    finally:
        late.end()


def test_a_plugin_is_started_from_the_folder_and_ends_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "conf").mkdir()
    program = tmp_path / "plugins" / "30-go"
    shutil.copy(build.plugin(build.NEW), program)
    (tmp_path / "conf" / "go.conf").write_text("its text")
    settings = {
        "nri": {
            "enabled": True,
            "socket": str(tmp_path / "nri.sock"),
            "plugin_dir": str(tmp_path / "plugins"),
            "plugin_config_dir": str(tmp_path / "conf"),
            "registration_timeout_s": 30.0,
            "disable_external": True,
            "required_plugins": ["30-go"],
        }
    }
    with Server(settings=settings) as server:
        server.load_image()
        container = server.launch(
            server.run_pod(server.pod_config(annotations={"test/env": "BY=go"}))
        )
        assert server.output(container, "sh", "-c", "echo $BY") == "go\n"
        assert not (tmp_path / "nri.sock").exists()
        lines = program.with_name("30-go.out").read_text().splitlines()
        assert "Configure pyrunc its text" in lines
        server.remove_all()
        server.stop()
        assert not [p for p in Path("/proc").glob("[0-9]*/exe") if _target(p) == str(program)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
