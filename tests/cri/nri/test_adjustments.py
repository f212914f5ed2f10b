"""Tests that NRI plugins change containers: at creation, in updates of resources, and at any other
time."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from tests.cri.server_harness import Server, message_of
from tests.support.nri import TestPlugin
from tests.support.processes import wait_until

Linux = api.LinuxContainerAdjustment


def adjusts(**fields: Any) -> dict[str, Callable[[Any], Any]]:
    """Return handlers of a plugin that sets these fields of ContainerAdjustment for every
    container."""
    response = api.CreateContainerResponse(adjust=api.ContainerAdjustment(**fields))
    return {"CreateContainer": lambda _: response}


@pytest.mark.requirement("13.21")
def test_a_container_runs_as_adjusted(server: Server, nri_socket: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("from the host\n")
    device = os.stat("/dev/null")
    handlers = adjusts(
        env=[api.KeyValue(key="FROM_PLUGIN", value="yes"), api.KeyValue(key="-FROM_IMAGE")],
        mounts=[
            api.Mount(
                destination="/host", type="bind", source=str(tmp_path), options=["rbind", "ro"]
            )
        ],
        rlimits=[api.POSIXRlimit(type="RLIMIT_NOFILE", soft=111, hard=222)],
        annotations={"added": "1"},
        linux=Linux(
            devices=[
                api.LinuxDevice(
                    path="/dev/mynull",
                    type="c",
                    major=os.major(device.st_rdev),
                    minor=os.minor(device.st_rdev),
                    file_mode=api.OptionalFileMode(value=0o640),
                )
            ],
            oom_score_adj=api.OptionalInt(value=321),
        ),
    )
    with TestPlugin(nri_socket, handlers=handlers) as plugin:
        container = server.launch(server.run_pod())
        environment = server.output(container, "env").splitlines()
        assert "FROM_PLUGIN=yes" in environment and "FROM_IMAGE=yes" not in environment
        assert server.output(container, "cat", "/host/file") == "from the host\n"
        limits = server.output(container, "grep", "open files", "/proc/1/limits").split()
        assert limits[3:5] == ["111", "222"]
        assert server.output(container, "stat", "-c", "%A", "/dev/mynull") == "crw-r-----\n"
        assert server.exec(container, "sh", "-c", "echo x >/dev/mynull").exit_code == 0
        assert server.output(container, "cat", "/proc/1/oom_score_adj") == "321\n"
        notified = plugin.wait_for("PostCreateContainer").container
        assert notified.annotations["added"] == "1" and "FROM_PLUGIN=yes" in notified.env


def test_plugins_change_arguments_and_add_hooks(
    server: Server, nri_socket: Path, tmp_path: Path
) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ncat >{tmp_path}/state\n")
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    hooks = api.Hooks(create_runtime=[api.Hook(path=str(hook))])
    with TestPlugin(
        nri_socket,
        handlers=adjusts(args=["sh", "-c", "echo by the plugin; sleep 3600"], hooks=hooks),
    ):
        container = server.launch(server.run_pod())
        server.wait_logged(container, "by the plugin")
        assert container in (tmp_path / "state").read_text()


def test_adjusted_limits_are_in_the_cgroup_and_in_the_status(
    server: Server, nri_socket: Path
) -> None:
    resources = api.LinuxResources(cpu=api.LinuxCPU(shares=api.OptionalUInt64(value=512)))
    with TestPlugin(nri_socket, handlers=adjusts(linux=Linux(resources=resources))):
        container = server.launch(server.run_pod())
        assert server.status(container).resources.linux.cpu_shares == 512


def test_an_update_before_the_start_leaves_limits_that_cri_lacks(
    server: Server, nri_socket: Path
) -> None:
    memory = api.LinuxMemory(reservation=api.OptionalInt64(value=1 << 20))
    resources = api.LinuxResources(pids=api.LinuxPids(limit=77), memory=memory)
    with TestPlugin(nri_socket, handlers=adjusts(linux=Linux(resources=resources))):
        container = server.create(server.run_pod())
        limits = cri.LinuxContainerResources(cpu_shares=222, memory_limit_in_bytes=1 << 26)
        request = cri.UpdateContainerResourcesRequest(container_id=container, linux=limits)
        server.runtime.UpdateContainerResources(request, timeout=30)
        config = server.state / "containers" / container / "config.json"
        written = json.loads(config.read_text())["linux"]["resources"]
        assert written["pids"] == {"limit": 77} and written["cpu"]["shares"] == 222
        assert written["memory"] == {"reservation": 1 << 20, "limit": 1 << 26, "swap": 1 << 26}


def test_the_second_plugin_sees_the_first_and_may_not_contradict(
    server: Server, nri_socket: Path
) -> None:
    pod = server.run_pod()
    first = adjusts(env=[api.KeyValue(key="A", value="1")])
    with (
        TestPlugin(nri_socket, index="05", handlers=first),
        TestPlugin(nri_socket, index="06") as second,
    ):
        server.create(pod)
        assert "A=1" in second.wait_for("CreateContainer").container.env
        second.handlers |= first
        config = server.container_config(metadata=cri.ContainerMetadata(name="d"))
        assert (
            message_of(lambda: server.create(pod, config))
            == "NRI plugins 06-test and 05-test both set Env A"
        )
        assert len(server.containers()) == 1


def test_a_validator_sees_the_plugin_of_each_field_and_may_reject(
    server: Server, nri_socket: Path
) -> None:
    pod = server.run_pod()
    rejection = api.ValidateContainerAdjustmentResponse(reject=True, reason="no such thing here")
    validator = {"ValidateContainerAdjustment": lambda _: rejection}
    with (
        TestPlugin(
            nri_socket, index="05", handlers=adjusts(env=[api.KeyValue(key="A", value="1")])
        ),
        TestPlugin(nri_socket, index="50", handlers=validator) as plugin,
    ):
        message = message_of(lambda: server.create(pod))
        assert message == "NRI validator 50-test rejects the container: no such thing here"
        seen = plugin.wait_for("ValidateContainerAdjustment")
        assert "A=1" not in seen.container.env and seen.adjust.env[0].key == "A"
        (owners,) = seen.owners.owners.values()
        assert owners.compound[api.Env].owners["A"] == "05-test"
        assert [(p.index, p.name) for p in seen.plugins] == [("05", "test"), ("50", "test")]
        assert not server.containers()


def update(container: str, shares: int) -> api.ContainerUpdate:
    cpu = api.LinuxCPU(shares=api.OptionalUInt64(value=shares))
    linux = api.LinuxContainerUpdate(resources=api.LinuxResources(cpu=cpu))
    return api.ContainerUpdate(container_id=container, linux=linux)


def shares_of(server: Server, container: str) -> int:
    return int(server.status(container).resources.linux.cpu_shares)


def test_plugins_change_an_update(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    other = server.launch(pod)
    container = server.launch(
        pod, server.container_config(metadata=cri.ContainerMetadata(name="d"))
    )
    answer = api.UpdateContainerResponse(update=[update(container, 333), update(other, 444)])
    with TestPlugin(nri_socket, handlers={"UpdateContainer": lambda _: answer}) as plugin:
        resources = cri.LinuxContainerResources(cpu_shares=222)
        request = cri.UpdateContainerResourcesRequest(container_id=container, linux=resources)
        server.runtime.UpdateContainerResources(request, timeout=30)
        assert plugin.wait_for("UpdateContainer").linux_resources.cpu.shares.value == 222
        assert (shares_of(server, container), shares_of(server, other)) == (333, 444)
        assert plugin.methods(container) == ["UpdateContainer", "PostUpdateContainer"]


def test_a_creation_and_a_stop_update_other_containers(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    other = server.launch(pod)
    handlers = {
        "CreateContainer": lambda _: api.CreateContainerResponse(update=[update(other, 111)]),
        "StopContainer": lambda _: api.StopContainerResponse(update=[update(other, 999)]),
    }
    with TestPlugin(nri_socket, handlers=handlers):
        container = server.launch(
            pod, server.container_config(metadata=cri.ContainerMetadata(name="d"))
        )
        assert shares_of(server, other) == 111
        server.stop_container(container)
        assert wait_until(lambda: shares_of(server, other) == 999, 30)


def test_plugins_may_update_and_evict_at_any_time(server: Server, nri_socket: Path) -> None:
    with TestPlugin(nri_socket) as plugin:
        container = server.launch(server.run_pod())
        assert not plugin.update(update(container, 77)).failed
        assert shares_of(server, container) == 77
        assert not plugin.update(update("0" * 64, 77)).failed
        plugin.update(evict=container)
        ended = server.wait_exit(container)
        assert ended.exit_code == 137
        assert [u.container_id for u in plugin.update(update(container, 7)).failed] == [container]


def test_a_creation_may_evict_another_container(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    victim = server.launch(pod)
    response = api.CreateContainerResponse(evict=[api.ContainerEviction(container_id=victim)])
    with TestPlugin(nri_socket, handlers={"CreateContainer": lambda _: response}):
        server.launch(pod, server.container_config(metadata=cri.ContainerMetadata(name="d")))
        assert server.status(victim).state == cri.CONTAINER_EXITED


def test_an_invalid_adjustment_fails_the_call(server: Server, nri_socket: Path) -> None:
    pod = server.run_pod()
    with TestPlugin(nri_socket, handlers=adjusts(mounts=[api.Mount(destination="/")])) as plugin:
        with pytest.raises(grpc.RpcError, match="NRI: cannot mount at '/'"):
            server.create(pod)
        refused = plugin.wait_for("CreateContainer").container.id
        assert plugin.methods(refused)[-2:] == ["StopContainer", "RemoveContainer"]
        assert not server.containers()
