"""Tests invalid answers of NRI plugins: each fails the call that it answers, and changes nothing of
other containers or of the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as cri
from cri_server.api import nri_pb2 as api
from tests.cri.nri.test_adjustments import adjusts
from tests.cri.server_harness import Server
from tests.support.nri import Refused, TestPlugin

Linux = api.LinuxContainerAdjustment


def linux(**fields: Any) -> dict[str, Callable[[Any], Any]]:
    return adjusts(linux=Linux(**fields))


def resources(**fields: Any) -> dict[str, Callable[[Any], Any]]:
    return linux(resources=api.LinuxResources(**fields))


LIES = {
    "limits below zero": resources(memory=api.LinuxMemory(limit=api.OptionalInt64(value=-2))),
    "shares beyond 64 bits": resources(
        cpu=api.LinuxCPU(shares=api.OptionalUInt64(value=2**64 - 1))
    ),
    "files of cgroups": resources(unified={"../../cgroup.procs": "1"}),
    "sysctls with a path": linux(sysctl={"kernel/../../../etc/x": "1"}),
    "sysctls of the machine": linux(sysctl={"kernel.core_pattern": "|/bin/sh"}),
    "a namespace of no type": linux(
        namespaces=[api.LinuxNamespace(type="x", path="/proc/1/ns/net")]
    ),
    "a namespace that is no file": linux(
        namespaces=[api.LinuxNamespace(type="uts", path="/proc/1/mem")]
    ),
    "a device of no type": linux(
        devices=[api.LinuxDevice(path="/dev/x", type="q", major=-5, minor=2**40)]
    ),
    "a rlimit of no type": adjusts(rlimits=[api.POSIXRlimit(type="RLIMIT_X", hard=1, soft=2)]),
    "a rlimit that is none": adjusts(
        rlimits=[api.POSIXRlimit(type="RLIMIT_NOFILE", hard=1, soft=2**64 - 1)]
    ),
    "a mount of a path with NUL": adjusts(
        mounts=[api.Mount(destination="/a\0b", source="/etc", type="bind")]
    ),
    "options of mounts": adjusts(
        mounts=[
            api.Mount(destination="/a", source="tmpfs", type="tmpfs", options=["size=\n1", "x=\0"])
        ]
    ),
    "a CDI device": adjusts(CDI_devices=[api.CDIDevice(name="../../x=y")]),
    "an environment with NUL": adjusts(env=[api.KeyValue(key="A", value="b\0C=d")]),
    "arguments with NUL": adjusts(args=["true\0"]),
    "another's update": {
        "CreateContainer": lambda _: api.CreateContainerResponse(
            update=[api.ContainerUpdate(container_id="../../x")],
            evict=[api.ContainerEviction(container_id="")],
        )
    },
}
HARMLESS = ("another's update",)  # names no container, so there is nothing to do


def outcome(server: Server, pod: str, name: str = "c") -> tuple[grpc.StatusCode | None, str]:
    """Create, start and remove a container; return the error's code and text, or None and ""
    without an error."""
    try:
        config = server.container_config(metadata=cri.ContainerMetadata(name=name))
        container = server.create(pod, config)
        server.start_container(container)
    except grpc.RpcError as error:
        return error.code(), str(error.details())  # type: ignore[attr-defined]
    server.remove_container(container)
    return None, ""


@pytest.mark.parametrize("lie", LIES)
def test_an_invalid_adjustment_fails_only_its_own_call(
    server: Server, nri_socket: Path, lie: str
) -> None:
    """The error has no text of a Python exception and no control character, and without the plugin
    the same container runs."""
    pod = server.run_pod()
    with TestPlugin(nri_socket, handlers=LIES[lie]):
        code, message = outcome(server, pod)
        for container in server.containers():
            server.remove_container(container.id)
    assert (code is None) == (lie in HARMLESS), message
    assert not re.search(r"Traceback|[a-z]Error:", message) and not any(
        ord(c) < 32 for c in message
    ), message
    assert outcome(server, pod) == (None, "")


@pytest.mark.parametrize("place", ["neighbour", "above", "root", "climbing"])
def test_an_adjustment_to_a_foreign_cgroup_is_refused(
    server: Server, nri_socket: Path, place: str
) -> None:
    """When a plugin gives a new container the cgroup of another container, the cgroup above it, or
    the root, the creation fails, and the other container lives."""
    pod = server.run_pod()
    neighbour = server.launch(pod)
    config = json.loads((server.state / "containers" / neighbour / "config.json").read_text())
    theirs = config["linux"]["cgroupsPath"]
    path = {
        "neighbour": theirs,
        "above": theirs.rpartition("/")[0] or theirs.partition(":")[0],
        "root": "/",
        "climbing": "/../../..",
    }[place]
    with TestPlugin(nri_socket, handlers=linux(cgroups_path=path)):
        other = server.container_config(metadata=cri.ContainerMetadata(name="other"))
        try:
            container = server.launch(pod, other)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error  # type: ignore[attr-defined]
        else:
            server.remove_container(container)
            pytest.fail("it ran in a cgroup that is not its own")
    assert server.status(neighbour).state == cri.CONTAINER_RUNNING
    assert server.output(neighbour, "echo", "alive") == "alive\n"


def test_texts_of_a_plugin_are_escaped(server: Server, nri_socket: Path) -> None:
    """When an error or the reason of an eviction contains escape sequences and new lines, the log
    contains neither."""
    evil = "\x1b[2J\nlevel=INFO forged"
    pod = server.run_pod()
    victim = server.launch(pod)
    response = api.CreateContainerResponse(
        evict=[api.ContainerEviction(container_id=victim, reason=evil)]
    )
    with TestPlugin(nri_socket, handlers={"CreateContainer": lambda _: response}):
        server.create(pod, server.container_config(metadata=cri.ContainerMetadata(name="d")))

    def fail(_: Any) -> None:
        raise Refused(evil)

    with TestPlugin(nri_socket, handlers={"CreateContainer": fail}):
        code, message = outcome(server, pod, "e")
    assert code is not None and "forged" in message  # which clients escape
    lines = server.log.read_text().splitlines()
    assert not [line for line in lines if line.startswith("level=INFO forged") or "\x1b" in line]
