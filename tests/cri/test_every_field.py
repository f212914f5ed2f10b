"""Tests every field of every request with one malformed value at a time: the answer is a documented
code or success, and nothing stays behind.

With its original value each request would succeed. A pod or container that is made despite the
value is started and removed, because the value must not cause a fault later either.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from cri_server.api import api_pb2 as api
from tests.cri.server_harness import IMAGE, Server
from tests.support.processes import wait_until

UNKNOWN_ID = "f" * 64
DOCUMENTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.OUT_OF_RANGE,
}
TEXTS = ["", "\0", ".", "..", "/../..", "a\nb", "x" * 5000, "/dev/null/x", "é"]
VALUES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: [b"", b"\0", b"\xff"],
    FieldDescriptor.TYPE_BOOL: [True],
    FieldDescriptor.TYPE_ENUM: [99, -1],
    FieldDescriptor.TYPE_INT32: [-1, -(2**31), 2**31 - 1],
    FieldDescriptor.TYPE_INT64: [-1, -(2**63), 2**63 - 1],
    FieldDescriptor.TYPE_UINT32: [2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [2**64 - 1],
    FieldDescriptor.TYPE_DOUBLE: [-1.0, float("nan"), float("inf")],
}
Way = tuple[FieldDescriptor, ...]
CALL_TIMEOUT_S = 60.0
REGISTRY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server, empty_registry(server):
        server.load_image()
        yield server


@contextlib.contextmanager
def empty_registry(server: Server) -> Iterator[None]:
    """Provide a registry at REGISTRY that answers 404 to everything."""
    folder = server.folder / "nothing"
    folder.mkdir()
    # If no registry listened there, the server would retry for a while.
    command = server.in_its_network("busybox", "httpd", "-f", "-p", REGISTRY, "-h", str(folder))
    with subprocess.Popen(command) as program:
        try:
            ask = server.in_its_network("busybox", "nc", *REGISTRY.split(":"))
            assert wait_until(
                lambda: subprocess.run(ask, stdin=subprocess.DEVNULL, check=False).returncode == 0,
                30,
            )
            yield
        finally:
            program.kill()


def ways(descriptor: Any, above: Way = ()) -> Iterator[Way]:
    """Yield the paths of all fields of a message, including those of inner messages."""
    for field in descriptor.fields:
        if field.message_type is None or is_map(field):
            yield (*above, field)
        else:
            yield from ways(field.message_type, (*above, field))


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def put(message: Any, way: Way, value: Any) -> None:
    """Set the field at this path. In a list on the path, use the last item, or add one."""
    for field in way[:-1]:
        target = getattr(message, field.name)
        if field.is_repeated:
            message = target[-1] if len(target) else target.add()
        else:
            target.SetInParent()
            message = target
    last = way[-1]
    if is_map(last):
        getattr(message, last.name)[value[0]] = value[1]
    elif last.is_repeated:
        getattr(message, last.name).append(value)
    else:
        setattr(message, last.name, value)


def values(way: Way, ids: list[str]) -> list[Any]:
    last = way[-1]
    if is_map(last):
        return (
            [(text, "1") for text in TEXTS]
            + [("net.ipv4.ip_forward", text) for text in TEXTS]
            + [("net.no.such", "1")]
        )
    choices = VALUES[last.type]
    named = last.type == FieldDescriptor.TYPE_STRING and last.name.endswith("id")
    return [*choices, *ids] if named else choices


class Target:
    """A pod with a running and a created container, and requests about them that succeed."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pod, self.other = server.run_pod(), server.run_pod()
        self.running = server.launch(self.pod)
        self.ids = [
            self.pod[:6],
            self.running[:6],
            self.other,
            UNKNOWN_ID,
            f"../{self.pod}",
            self.running,
        ]

    def base(self, call: str) -> Any:
        request = getattr(api, REQUESTS[call])()
        if call == "RunPodSandbox":
            request.config.CopyFrom(self.server.pod_config())
            request.config.dns_config.servers.append("10.0.0.1")
            request.config.port_mappings.add(container_port=80, host_port=18080)
        elif call == "CreateContainer":
            request.pod_sandbox_id = self.pod
            request.config.CopyFrom(self.server.container_config())
            request.config.mounts.add(container_path="/mnt", host_path=str(self.server.logs))
            request.config.devices.add(
                container_path="/dev/x", host_path="/dev/null", permissions="r"
            )
            request.config.envs.add(key="K", value=b"v")
        elif call in ("PullImage", "RemoveImage", "ImageStatus"):
            request.image.image = f"{REGISTRY}/no/such:image" if call != "ImageStatus" else IMAGE
        for name, value in (("container_id", self.running), ("pod_sandbox_id", self.pod)):
            if hasattr(request, name):
                setattr(request, name, value)
        if hasattr(request, "cmd"):
            request.cmd.append("true")
        if hasattr(request, "stdout"):
            request.stdout = True
        return request

    def call(self, call: str, request: Any) -> Any:
        stub = self.server.image if hasattr(self.server.image, call) else self.server.runtime
        return getattr(stub, call)(request, timeout=CALL_TIMEOUT_S)

    def undo(self, call: str, answer: Any) -> None:
        """Use the pod or container that the call has made, and remove it."""
        if call == "RunPodSandbox":
            self.server.pod_status(answer.pod_sandbox_id)
            self.server.remove_pod(answer.pod_sandbox_id)
        elif call == "CreateContainer":
            try:
                self.server.start_container(answer.container_id)
            finally:
                self.server.remove_container(answer.container_id)

    def left(self) -> dict[str, list[str]]:
        """Return the pods and containers on disk and in the lists."""
        folders = (self.server.root, self.server.state)
        below = ("sandboxes", "containers", "pods", "shims")
        leftovers = {
            str(f / name): sorted(os.listdir(f / name))
            for f in folders
            for name in below
            if (f / name).is_dir()
        }
        leftovers["pods"] = sorted(pod.id for pod in self.server.pods())
        leftovers["containers"] = sorted(container.id for container in self.server.containers())
        return leftovers


REQUESTS = {
    method.name: method.input_type.name
    for service in ("RuntimeService", "ImageService")
    for method in api.DESCRIPTOR.services_by_name[service].methods
    if not method.server_streaming
}
# These calls would end or change the target for later calls.
ENDING = ("StopPodSandbox", "RemovePodSandbox", "StopContainer", "RemoveContainer", "RemoveImage")


@pytest.fixture(scope="module")
def target(server: Server) -> Target:
    return Target(server)


@pytest.mark.parametrize("call", sorted(REQUESTS))
def test_every_field_of_a_request_is_handled(target: Target, call: str) -> None:
    before, log_at = target.left(), target.server.log.stat().st_size
    # each pull is its own process
    with ThreadPoolExecutor(8 if call == "PullImage" else 1) as pool:
        faults = pool.map(lambda case: attempt(target, call, *case), cases(target, call))
        wrong = [fault for fault in faults if fault]
    assert not wrong, "\n".join(wrong)
    assert target.left() == before
    assert "Traceback" not in target.server.log.read_bytes()[log_at:].decode(errors="replace")


def cases(target: Target, call: str) -> Iterator[tuple[Way, Any]]:
    """Yield each field of the call's request with each value, except values that would end the
    target, and fields for Windows."""
    mine = (target.pod[:6], target.running[:6], target.other, target.running)
    for way in ways(getattr(api, REQUESTS[call]).DESCRIPTOR):
        if "windows" not in (field.name for field in way):
            for value in values(way, target.ids):
                if not (call in ENDING and value in mine):
                    yield way, value


def set_unknown(request: Any) -> None:
    for name in ("pod_sandbox_id", "container_id"):
        if hasattr(request, name):
            setattr(request, name, UNKNOWN_ID)


def attempt(target: Target, call: str, way: Way, value: Any) -> str:
    """Send the request with this value; return the fault of the answer, or an empty text."""
    request = target.base(call)
    if call in ENDING and not way[-1].name.endswith("_id"):
        set_unknown(request)
    put(request, way, value)
    try:
        target.undo(call, target.call(call, request))
    except grpc.RpcError as error:
        code, text = error.code(), str(error.details())  # type: ignore[attr-defined]
        # kubelet knows the prefix, and its client shows it only for this code.
        if code not in DOCUMENTED and not text.startswith("RegistryUnavailable"):
            return (
                f"{'.'.join(f.name for f in way)} = {str(value)[:40]!r}: {code.name}: {text[:300]}"
            )
    return ""
