"""Tests how NRI plugins join and leave: plugins that the server starts, that connect late, that are
refused or do not answer. No event is lost meanwhile."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as cri
from cri_server.operations.steps import FAILPOINT
from tests.cri.nri.test_events import Held, in_thread
from tests.cri.server_harness import REPOSITORY, Server, code_of
from tests.support.nri import TestPlugin, ids
from tests.support.processes import wait_until

# Writes what it was configured with and each method that it is told of to files beside itself.
PROGRAM = f"""#!{sys.executable}
import os, socket, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from pathlib import Path
from tests.support.nri import TestPlugin, ids
folder = Path(__file__).parent.parent
plugin = TestPlugin(socket.socket(fileno=int(os.environ["NRI_PLUGIN_SOCKET"])), \
index="99", name="ignored")
with plugin:
    name = os.environ["NRI_PLUGIN_IDX"] + "-" + os.environ["NRI_PLUGIN_NAME"]
    (folder / name).write_text(f"{{os.environ['NRI_PLUGIN_SOCKET']}} {{plugin.config.config}}")
    plugin.wait_s = 3600
    plugin.wait(lambda: plugin.closed)
"""


def test_a_late_plugin_is_synchronized(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    running = server.launch(pod)
    created = server.create(pod, server.container_config(metadata=cri.ContainerMetadata(name="d")))
    gone = server.launch(
        pod, server.container_config(("true",), metadata=cri.ContainerMetadata(name="e"))
    )
    server.wait_exit(gone)
    with TestPlugin(nri_socket) as plugin:
        assert [p.id for p in plugin.pods] == [pod]
        assert {c.id for c in plugin.containers} == {running, created}
        assert plugin.containers[0].args and plugin.containers[0].pod_sandbox_id == pod
        server.start_container(created)
        server.remove_container(running)
        assert plugin.methods(created) == ["StartContainer", "PostStartContainer"]
        assert plugin.methods(running) == ["StopContainer", "RemoveContainer"]


def test_a_container_with_a_variable_that_is_not_utf_8_keeps_no_plugin_away(
    server: Server, nri_socket: Path
) -> None:
    pod = server.run_pod()
    # HOME usually comes from the image's /etc/passwd, whose author chooses the bytes.
    config = server.container_config(envs=[cri.KeyValue(key="HOME", value=b"/\xff")])
    container = server.launch(pod, config)
    with TestPlugin(nri_socket) as plugin:
        assert [c.id for c in plugin.containers] == [container]
        assert "HOME=/\ufffd" in plugin.containers[0].env


def test_events_during_the_synchronization_reach_the_plugin(
    server: Server, nri_socket: Path
) -> None:
    """The plugin gets each container once, created before, during or after the synchronization."""
    pod = server.run_pod()

    def launch(name: str) -> str:
        return server.launch(
            pod, server.container_config(metadata=cri.ContainerMetadata(name=name))
        )

    before = launch("before")
    with Held() as held:
        plugin = TestPlugin(nri_socket, handlers={"Synchronize": held})
        plugin.start()
        assert held.reached.wait(60)
        waiting = [in_thread(lambda name=name: launch(name)) for name in ("m1", "m2", "m3")]
        held.__exit__()
        during = {finish() for finish in waiting}
    after = launch("after")
    assert [c.id for c in plugin.containers] == [before]
    notified = [request.container.id for name, request in plugin.calls if name == "CreateContainer"]
    assert set(notified) == {*during, after} and len(notified) == 4
    plugin.close()


def test_a_container_that_is_being_created_is_part_of_the_synchronization(
    server: Server, nri_socket: Path
) -> None:
    """When a plugin joins while another plugin handles CreateContainer, the server sends it the
    new container, which is not listed yet."""
    pod = server.run_pod()
    second = TestPlugin(nri_socket, index="50")

    def start_the_second(request: Any) -> None:
        second.start()

    with TestPlugin(nri_socket, index="05", handlers={"CreateContainer": start_the_second}):
        container = server.create(pod)
        second.wait(lambda: second.synchronized)
        notified = {c.id for c in second.containers} | {r.container.id for _, r in second.calls}
        assert container in notified
    second.close()


@pytest.mark.parametrize(("index", "name"), [("1", "a"), ("ab", "a"), ("00", ""), ("00", "a/b")])
def test_a_plugin_with_an_invalid_name_is_refused(
    server: Server, nri_socket: Path, index: str, name: str
) -> None:
    with TestPlugin(nri_socket, index=index, name=name) as plugin:
        assert plugin.closed and plugin.config is None


def test_a_plugin_that_breaks_the_protocol_is_disconnected(
    server: Server, nri_socket: Path
) -> None:
    plugin = TestPlugin(nri_socket, register=False)
    plugin.start()
    plugin.send_raw(b"\0\0\0\1\377\377\377\377")
    plugin.wait(lambda: plugin.closed)
    plugin.close()
    assert server.run_pod()


def test_a_restarted_server_synchronizes_plugins(own_socket: Path) -> None:
    settings = {"nri": {"enabled": True, "socket": str(own_socket)}}
    with Server(settings=settings) as server:
        server.load_image()
        container = server.launch(server.run_pod())
        with TestPlugin(own_socket) as plugin:
            server.restart()
            plugin.wait(lambda: plugin.closed)
        with TestPlugin(own_socket) as plugin:
            assert [c.id for c in plugin.containers] == [container]
            server.stop_container(container)
            assert plugin.methods(container) == ["StopContainer"]


@pytest.fixture
def own_socket(tmp_path: Path) -> Path:
    return tmp_path / "nri.sock"


@pytest.fixture
def impatient(tmp_path: Path, own_socket: Path) -> Iterator[Server]:
    """Provide a server with executables in its plugin folder, a short request timeout, and a
    required plugin."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "conf").mkdir()
    for name in ("20-second", "10-first"):
        program = tmp_path / "plugins" / name
        program.write_text(PROGRAM)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "plugins" / "README").write_text("not executable")
    (tmp_path / "plugins" / "broken").write_text("#!/bin/false")
    (tmp_path / "plugins" / "broken").chmod(0o755)
    (tmp_path / "conf" / "10-first.conf").write_text("by index and name")
    (tmp_path / "conf" / "second.conf").write_text("by name")
    settings = {
        "nri": {
            "enabled": True,
            "socket": str(own_socket),
            "plugin_dir": str(tmp_path / "plugins"),
            "plugin_config_dir": str(tmp_path / "conf"),
            "required_plugins": ["important"],
            "registration_timeout_s": 30.0,
            "request_timeout_s": 3.0,
        }
    }
    with Server(settings=settings) as server:
        server.load_image()
        yield server


def test_programs_of_the_folder_start_and_required_plugins_are_needed(
    impatient: Server, own_socket: Path, tmp_path: Path
) -> None:
    server = impatient
    assert wait_until(lambda: (tmp_path / "20-second").exists(), 60)
    assert (tmp_path / "10-first").read_text() == "3 by index and name"
    assert (tmp_path / "20-second").read_text() == "3 by name"
    assert "broken is not a plugin" in server.log.read_text()
    assert stat.S_IMODE(own_socket.stat().st_mode) == 0o600
    pod = server.run_pod()
    assert code_of(lambda: server.create(pod)) is grpc.StatusCode.UNAVAILABLE
    with (
        Held() as held,
        TestPlugin(own_socket, name="important"),
        TestPlugin(own_socket, name="slow", handlers={"StartContainer": held}) as slow,
    ):
        container = server.launch(pod)  # 3 s, then it goes on without the slow one
        slow.wait(lambda: slow.closed)
        assert server.status(container).state == cri.CONTAINER_RUNNING
    server.remove_all()
    server.stop()
    assert not own_socket.exists()
    assert not programs(tmp_path)


def programs(folder: Path) -> list[str]:
    """Return the command lines of the processes that run plugins of the plugin folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue
        if str(folder / "plugins") in command:
            pids.append(command)
    return pids


@pytest.mark.parametrize(
    "point",
    [
        "run_sandbox.record",
        "create_container.folders",
        "create_container.launch",
        "start_container.execute",
    ],
)
def test_a_failure_after_plugins_were_notified_is_rolled_back(own_socket: Path, point: str) -> None:
    with Server(settings={"nri": {"enabled": True, "socket": str(own_socket)}}) as server:
        server.load_image()
        server.stop()
        server.start(**{FAILPOINT: f"{point}=1*error"})
        with TestPlugin(own_socket) as plugin:
            with pytest.raises(grpc.RpcError, match=f"failpoint {point}"):
                server.launch(server.run_pod())
            server.launch(server.run_pod(), server.container_config())
            server.remove_all()
            identifiers = {c for _, request in plugin.calls for c in ids(request)}
            for identifier in identifiers:
                methods = plugin.methods(identifier)
                assert methods[0] in ("RunPodSandbox", "CreateContainer"), methods
                assert len([m for m in methods if m in ("StopPodSandbox", "StopContainer")]) == 1, (
                    methods
                )
                assert methods[-1] in ("RemovePodSandbox", "RemoveContainer"), methods
            assert len(identifiers) == (3 if point.startswith("run") else 4)
