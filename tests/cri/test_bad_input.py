"""Tests invalid requests: each gets a documented code and a message, and leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import Server, code_of, server_fixture

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN_ID = "f" * 64


server = server_fixture("module")


@pytest.fixture(scope="module")
def pod(server: Server) -> str:
    return server.run_pod(server.pod_config("target"))


def linux(**fields: Any) -> api.LinuxPodSandboxConfig:
    return api.LinuxPodSandboxConfig(**fields)


def userns(**fields: Any) -> api.LinuxPodSandboxConfig:
    options = api.NamespaceOption(userns_options=api.UserNamespace(**fields))
    return linux(security_context=api.LinuxSandboxSecurityContext(namespace_options=options))


@pytest.mark.requirement("1.a.8", "3.1.4", "8.16")
@pytest.mark.parametrize(
    "change",
    [
        {"hostname": "x" * 65},
        {"hostname": "a b"},
        {"log_directory": "relative"},
        {"linux": linux(cgroup_parent="test.slice")},
        {"linux": linux(cgroup_parent="/a/../../b")},
        {"linux": linux(sysctls={"kernel.panic": "1"})},
        {"linux": linux(sysctls={"net.ipv4.ip_forward": "1\nx"})},
        {"linux": linux(sysctls={"net..ipv4": "1"})},
        {"linux": userns(mode=api.POD)},
        {"linux": userns(mode=api.TARGET)},
        {"dns_config": api.DNSConfig(servers=["1.2.3.4\nnameserver 6.6.6.6"])},
        {"port_mappings": [api.PortMapping(container_port=80, host_port=70000)]},
        {"port_mappings": [api.PortMapping(container_port=-1, host_port=80)]},
        {"port_mappings": [api.PortMapping(container_port=1, host_port=80, protocol=9)]},  # type: ignore[arg-type]
    ],
)
def test_an_invalid_sandbox_configuration_creates_nothing(
    server: Server, pod: str, change: dict[str, Any]
) -> None:
    config = server.pod_config("bad", **change)
    assert code_of(lambda: server.run_pod(config)) == INVALID
    assert (
        len(server.pods()) == 1 and not list((server.state / "sandboxes").glob("*/pause.json"))[1:]
    )


@pytest.mark.requirement("1.a.8")
@pytest.mark.parametrize("field", ["name", "namespace", "uid"])
def test_metadata_is_required(server: Server, pod: str, field: str) -> None:
    config = server.pod_config("bad")
    config.metadata.ClearField(field)  # type: ignore[arg-type]
    assert code_of(lambda: server.run_pod(config)) == INVALID
    assert code_of(lambda: server.run_pod(api.PodSandboxConfig())) == INVALID


@pytest.mark.requirement("1.a.12")
def test_an_unknown_handler_is_refused(server: Server) -> None:
    request = api.RunPodSandboxRequest(config=server.pod_config("bad"), runtime_handler="kata")
    assert code_of(lambda: server.runtime.RunPodSandbox(request)) == INVALID


def security(**fields: Any) -> dict[str, Any]:
    return {
        "linux": api.LinuxContainerConfig(
            security_context=api.LinuxContainerSecurityContext(**fields)
        )
    }


@pytest.mark.requirement(
    "1.a.8", "3.1.11", "4.1.3", "4.1.8", "4.1.9", "6.8", "6.13", "6.16", "8.2", "8.3", "8.8", "13.2"
)
@pytest.mark.parametrize(
    "change",
    [
        {"working_dir": "relative"},
        {"log_path": "/absolute"},
        {"log_path": "../../etc/passwd"},
        {"envs": [api.KeyValue(key="a=b")]},
        {"command": ["a\0b"]},
        {"stop_signal": 999},
        {"mounts": [api.Mount(container_path="x", host_path="/y")]},
        {"mounts": [api.Mount(container_path="/x", image=api.ImageSpec(image="busybox"))]},
        {"devices": [api.Device(host_path="/etc/passwd")]},
        {"devices": [api.Device(host_path="/dev/null", permissions="z")]},
        {"devices": [api.Device(host_path="/dev/null", container_path="/./")]},
        {"CDI_devices": [api.CDIDevice(name="vendor.com/class=x")]},
        security(privileged=True),
        security(capabilities=api.Capability(add_capabilities=["NOPE"])),
        security(run_as_username="nobody-here"),
        security(run_as_group=api.Int64Value(value=5)),
        security(run_as_user=api.Int64Value(value=-3)),
        security(masked_paths=["relative"]),
        security(namespace_options=api.NamespaceOption(pid=api.TARGET)),
        security(namespace_options=api.NamespaceOption(pid=7)),  # type: ignore[arg-type]
        security(
            seccomp=api.SecurityProfile(
                profile_type=api.SecurityProfile.Localhost, localhost_ref="/none"
            )
        ),
        security(seccomp_profile_path="localhost/relative"),
        {"linux": api.LinuxContainerConfig(resources=api.LinuxContainerResources(cpu_quota=-7))},
        {
            "linux": api.LinuxContainerConfig(
                resources=api.LinuxContainerResources(oom_score_adj=5000)
            )
        },
    ],
)
def test_an_invalid_container_configuration_creates_nothing(
    server: Server, pod: str, change: dict[str, Any]
) -> None:
    config = server.container_config(**change)
    assert code_of(lambda: server.create(pod, config)) == INVALID
    assert not server.containers() and not list((server.root / "containers").iterdir())


@pytest.mark.requirement("1.a.1", "1.a.2", "1.a.3", "1.a.4", "4.1.1", "4.1.2")
def test_unknown_ids_and_names_are_not_found(server: Server, pod: str) -> None:
    runtime = server.runtime
    absent = grpc.StatusCode.NOT_FOUND
    unknown_image = server.container_config(image=api.ImageSpec(image="no/such:image"))
    calls: list[Callable[[], object]] = [
        lambda: server.status(UNKNOWN_ID),
        lambda: server.pod_status(UNKNOWN_ID),
        lambda: server.start_container(UNKNOWN_ID),
        lambda: server.exec(UNKNOWN_ID, "true"),
        lambda: server.create(pod, unknown_image),
        lambda: runtime.CreateContainer(
            api.CreateContainerRequest(pod_sandbox_id=UNKNOWN_ID, config=server.container_config())
        ),
        lambda: runtime.Exec(api.ExecRequest(container_id=UNKNOWN_ID, cmd=["x"], stdout=True)),
        lambda: runtime.Attach(api.AttachRequest(container_id=UNKNOWN_ID, stdout=True)),
        lambda: runtime.PortForward(api.PortForwardRequest(pod_sandbox_id=UNKNOWN_ID)),
        lambda: runtime.ContainerStats(api.ContainerStatsRequest(container_id=UNKNOWN_ID)),
        lambda: runtime.PodSandboxStats(api.PodSandboxStatsRequest(pod_sandbox_id=UNKNOWN_ID)),
        lambda: runtime.ReopenContainerLog(api.ReopenContainerLogRequest(container_id=UNKNOWN_ID)),
        lambda: runtime.UpdateContainerResources(
            api.UpdateContainerResourcesRequest(container_id=UNKNOWN_ID)
        ),
        lambda: runtime.UpdatePodSandboxResources(
            api.UpdatePodSandboxResourcesRequest(pod_sandbox_id=UNKNOWN_ID)
        ),
    ]
    assert [code_of(call) for call in calls] == [absent] * len(calls)
    server.stop_container(UNKNOWN_ID), server.remove_container(UNKNOWN_ID)
    server.stop_pod(UNKNOWN_ID), server.remove_pod(UNKNOWN_ID)
    server.image.RemoveImage(api.RemoveImageRequest(image=api.ImageSpec(image="no/such:image")))
    answer = server.image.ImageStatus(
        api.ImageStatusRequest(image=api.ImageSpec(image="no/such:image"))
    )
    assert not answer.HasField("image")


@pytest.mark.requirement("1.a.8", "1.b.8", "4.10.1", "4.10.2")
def test_a_stream_request_is_checked_before_its_url_is_returned(server: Server, pod: str) -> None:
    container = server.launch(pod)
    try:
        for wrong in (
            api.ExecRequest(container_id=container, cmd=["x"]),
            api.ExecRequest(container_id=container, cmd=["x"], tty=True, stdout=True, stderr=True),
            api.ExecRequest(container_id=container, stdout=True),
        ):
            assert code_of(lambda wrong=wrong: server.runtime.Exec(wrong)) == INVALID  # type: ignore[misc]
        port = api.PortForwardRequest(pod_sandbox_id=pod, port=[0])
        assert code_of(lambda: server.runtime.PortForward(port)) == INVALID
        good = api.ExecRequest(container_id=container, cmd=["x"], stdout=True)
        assert server.runtime.Exec(good).url.startswith("http://127.0.0.1:")
    finally:
        server.remove_container(container)


@pytest.mark.requirement("4.7.1")
def test_values_that_the_kernel_refuses_are_invalid_arguments(server: Server, pod: str) -> None:
    """Paths and limits that pass the server's checks are still INVALID_ARGUMENT if the kernel
    refuses them."""
    container = server.launch(pod)
    below_a_file = server.create(
        pod, server.container_config(working_dir="/etc/passwd/x", metadata={"name": "w"})
    )
    no_format = api.LinuxContainerResources(unified={"cgroup.max.depth": "deep"})
    update = api.UpdateContainerResourcesRequest(container_id=container, linux=no_format)
    try:
        assert code_of(lambda: server.exec(container, "x" * 5000)) == INVALID
        assert code_of(lambda: server.exec(container, "/etc/passwd/x")) == INVALID
        assert code_of(lambda: server.start_container(below_a_file)) == INVALID
        assert code_of(lambda: server.runtime.UpdateContainerResources(update)) == INVALID
        assert not server.status(container).resources.linux.unified
    finally:
        server.remove_container(container)
        server.remove_container(below_a_file)


def test_a_host_port_of_another_pod_is_refused(server: Server, pod: str) -> None:
    mapping = api.PortMapping(container_port=80, host_port=18081)
    server.run_pod(server.pod_config("first", port_mappings=[mapping]))
    second = server.pod_config("second", port_mappings=[mapping])
    try:
        assert code_of(lambda: server.run_pod(second)) == grpc.StatusCode.FAILED_PRECONDITION
    finally:
        for leftover in server.pods():
            if leftover.id != pod:
                server.remove_pod(leftover.id)


# No hexadecimal text: it would be valid as the prefix of an id.
TEXTS = [
    "",
    "zz",
    "/",
    "..",
    "../../x",
    "\0",
    "x" * 300,
    "/etc/passwd",
    "é",
    "a\nb",
    UNKNOWN_ID,
    "-1",
]
NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31)]
FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def scramble(message: Any, chance: random.Random, depth: int = 0) -> None:
    """Set random fields of the message to extreme values of their types."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() < 0.6 or depth > 4:
            continue
        target = getattr(message, field.name)
        if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
            try:
                target[chance.choice(TEXTS)] = chance.choice(TEXTS)
            except (TypeError, ValueError):
                continue
        elif field.is_repeated and field.message_type:
            scramble(target.add(), chance, depth + 1)
        elif field.is_repeated:
            target.append(value(field, chance))
        elif field.message_type:
            target.SetInParent()
            scramble(target, chance, depth + 1)
        else:
            setattr(message, field.name, value(field, chance))


def value(field: Any, chance: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice(TEXTS).encode()
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return chance.choice([0, 1, 2, 3, 99])
    if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
        return chance.choice([0, 1, 2**31])
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return 0.5
    return chance.choice(NUMBERS)


RUNTIME_CALLS = sorted(
    (m.name, m.input_type.name)
    for m in api.DESCRIPTOR.services_by_name["RuntimeService"].methods
    if not m.server_streaming
)


@pytest.mark.requirement("14.2")
@pytest.mark.parametrize(("call", "request_type"), RUNTIME_CALLS)
def test_scrambled_requests_get_a_code_of_the_table(
    server: Server, pod: str, call: str, request_type: str
) -> None:
    chance = random.Random(f"{call}-7")
    before = len(server.pods())
    for _ in range(60):
        request = getattr(api, request_type)()
        scramble(request, chance)
        for name in ("pod_sandbox_id", "container_id"):
            if hasattr(request, name) and chance.random() < 0.5:
                setattr(
                    request,
                    name,
                    pod if name == "pod_sandbox_id" and call == "CreateContainer" else UNKNOWN_ID,
                )
        if hasattr(request, "timeout"):
            request.timeout = chance.choice([0, 1, -1])
        try:
            getattr(server.runtime, call)(request, timeout=30)
        except grpc.RpcError as error:
            assert error.code() in FINE, (call, error.details(), request)  # type: ignore[attr-defined]
    assert "Traceback" not in server.tail(400)
    for leftover in server.pods():
        if leftover.id != pod:
            server.remove_pod(leftover.id)
    for container in server.containers():
        server.remove_container(container.id)
    assert before == len(server.pods())
