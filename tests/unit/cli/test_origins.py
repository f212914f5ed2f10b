"""Tests the origins of a container's values: request, image or pod."""

from __future__ import annotations

from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.cli.observe.origins import HIDDEN, origins


def origins_by_item(
    config: api.ContainerConfig,
    image: dict[str, Any],
    pod: api.PodSandboxConfig | None = None,
    **spec: Any,
) -> dict[str, tuple[str, str]]:
    return {
        each.item: (each.value, each.origin)
        for each in origins(config, pod or api.PodSandboxConfig(), image, spec)
    }


def arguments(command: list[str], args: list[str], runs: list[str]) -> list[str]:
    by_item = origins_by_item(
        api.ContainerConfig(command=command, args=args), {}, process={"args": runs}
    )
    return [by_item[f"argument {n}"][1] for n in range(len(runs))]


def test_origins_of_arguments_are_found() -> None:
    assert arguments(["a"], ["b"], ["a", "b"]) == ["request: command", "request: args"]
    assert arguments([], ["b"], ["entry", "b"]) == ["image: Entrypoint or Cmd", "request: args"]
    assert arguments([], [], ["entry", "cmd"]) == ["image: Entrypoint or Cmd"] * 2


def test_the_environment_of_a_request_is_a_secret() -> None:
    config = api.ContainerConfig(
        envs=[api.KeyValue(key="A", value=b"x"), api.KeyValue(key="TOKEN", value=b"s3cret")]
    )
    by_item = origins_by_item(config, {"Env": ["A=1", "B=2=3"]})
    assert by_item["env A"] == (HIDDEN, "request: envs (instead of the image's)")
    assert by_item["env B"] == ("2=3", "image: Env") and by_item["env TOKEN"] == (
        HIDDEN,
        "request: envs",
    )


def test_mounts_and_namespaces() -> None:
    config = api.ContainerConfig(mounts=[api.Mount(container_path="/data/", host_path="/srv")])
    mounts = [
        {"destination": place, "type": kind}
        for place, kind in (
            ("/data", "bind"),
            ("/v", "bind"),
            ("/proc", "proc"),
            ("/etc/hosts", "bind"),
        )
    ]
    linux = {"namespaces": [{"type": "network", "path": "/proc/1/ns/net"}, {"type": "pid"}]}
    by_item = origins_by_item(config, {"Volumes": {"/v": {}}}, mounts=mounts, linux=linux)
    assert (
        by_item["mount /data"] == ("/srv", "request: mounts")
        and by_item["mount /v"][1] == "image: Volumes"
    )
    assert by_item["mount /proc"] == ("proc", "default") and by_item["mount /etc/hosts"][1] == "pod"
    assert by_item["namespace network"] == ("/proc/1/ns/net", "pod") and by_item[
        "namespace pid"
    ] == (
        "its own",
        "default",
    )
    assert by_item["namespace ipc"] == ("the host's", "request: namespace_options")


def test_origins_are_request_image_and_pod() -> None:
    config = api.ContainerConfig(working_dir="/w")
    config.linux.resources.memory_limit_in_bytes = 64 << 20
    config.linux.security_context.capabilities.drop_capabilities.append("ALL")
    pod = api.PodSandboxConfig(hostname="web")
    process = {"cwd": "/w", "user": {"uid": 7, "gid": 8}}
    linux = {"resources": {"memory": {"limit": 64 << 20}}}
    by_item = origins_by_item(config, {"User": "7:8"}, pod, process=process, linux=linux)
    assert by_item["folder"] == ("/w", "request: working_dir") and by_item["user"] == (
        "7:8",
        "image: User",
    )
    assert by_item["memory limit"] == (str(64 << 20), "request: resources") and by_item[
        "cpu quota"
    ] == (
        "none",
        "default",
    )
    assert by_item["capabilities"][1] == "default, request: -ALL" and by_item["hostname"] == (
        "web",
        "pod: hostname",
    )
    pod.linux.security_context.namespace_options.network = api.NODE
    assert origins_by_item(config, {}, pod)["hostname"][0] == "the host's"
