"""Sends twenty thousand messages, most of them with a fault, to one server: each gets a documented
code, and nothing stays behind.

`tests/cri/messages.py` makes the messages from the API's descriptors. They name pods and containers
in all states. The variables PYRUNC_MESSAGES_SEED and PYRUNC_MESSAGES set another seed and another
number.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cri_server.api import api_pb2 as api
from tests.cri.messages import DESTRUCTIVE, UNKNOWN_ID, Generator, Message, Things, calls
from tests.cri.server_harness import IMAGE, RPC_TIMEOUT_S, Server
from tests.cri.test_every_field import REGISTRY, empty_registry
from tests.support.processes import wait_until

SEED = int(os.environ.get("PYRUNC_MESSAGES_SEED", "13"))
MESSAGES = int(os.environ.get("PYRUNC_MESSAGES", "20000"))
DOCUMENTED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
    "RESOURCE_EXHAUSTED",
}
# kubelet's CRI client reads these reasons at the start of a message only for UNKNOWN.
REASONS = ("RegistryUnavailable", "SignatureValidationFailed")
EVENTS_S = 0.02  # a stream without end is read for so long
# Ends at SIGTERM, as init too, so that a StopContainer with a long timeout has its end.
COMMAND = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1000 & wait $!; done")
KEPT = 3  # pods, or containers, of messages, which later messages may name
GROWTH_LIMIT_KIB = 16 << 10
# So many more may exist at the end, from concurrent calls.
IDLE_WORKERS = Counter(socket=4, pipe=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server, empty_registry(server):
        server.load_image()
        yield server


class World:
    """Makes the pods and containers that messages name, and valid requests about them."""

    def __init__(self, server: Server) -> None:
        self.server, self.things = server, Things()
        self.made_pods: list[str] = []
        self.made_containers: list[str] = []
        (server.folder / "source").mkdir()
        self.things.host_paths = [
            str(server.folder / "source"),
            "/dev/null",
            str(server.folder / "none/such"),
            "/etc/passwd",
        ]
        self.things.images = [
            IMAGE,
            f"{REGISTRY}/no/such:image",
            f"{REGISTRY}/x",
            UNKNOWN_ID,
            f"sha256:{UNKNOWN_ID}",
            "a@b@c",
        ]
        self.refill()

    def refill(self) -> None:
        """Replace pods and containers that requests have removed: a pod with a container in each
        state, and a stopped pod."""
        there = {
            pod.id
            for pod in self.server.pods(state=api.PodSandboxStateValue(state=api.SANDBOX_READY))
        }
        alive = {
            c.id
            for c in self.server.containers(
                state=api.ContainerStateValue(state=api.CONTAINER_RUNNING)
            )
        }
        if not ({*self.things.pods[:1]} & there and {*self.things.containers[:1]} & alive):
            self.server.remove_all()
            pod, stopped = self.server.run_pod(), self.server.run_pod()
            self.server.stop_pod(stopped)
            running, exited = (
                self.server.launch(pod, self._container(n)) for n in ("running", "exited")
            )
            self.server.stop_container(exited)
            created = self.server.create(pod, self._container("created"))
            self.things.pods[:] = [pod, stopped]
            self.things.containers[:] = [running, exited, created]
            self.made_pods, self.made_containers = [], []

    def _container(self, name: str) -> api.ContainerConfig:
        return self.server.container_config(COMMAND, metadata=api.ContainerMetadata(name=name))

    def base(self, call: str) -> Any:
        """Return a valid request. For a call in `DESTRUCTIVE` the request names an unknown object,
        so that nothing is destroyed."""
        request = getattr(api, calls()[call].input_type.name)()
        fields = request.DESCRIPTOR.fields_by_name
        for name, ids in (
            ("container_id", self.things.containers),
            ("pod_sandbox_id", self.things.pods),
        ):
            if name in fields:
                usual = ids[-1] if call == "StartContainer" else ids[0]
                setattr(request, name, UNKNOWN_ID if call in DESTRUCTIVE else usual)
        if call == "RunPodSandbox":
            request.config.CopyFrom(self.server.pod_config())
            request.config.dns_config.servers.append("10.0.0.1")
            request.config.port_mappings.add(
                container_port=80, host_port=18080 + len(self.made_pods) % 100
            )
        elif call == "CreateContainer":
            count = len(self.made_containers)
            request.config.CopyFrom(self._container(f"c{count}"))
            request.config.metadata.attempt = count
            request.config.mounts.add(container_path="/mnt", host_path=self.things.host_paths[0])
            request.config.devices.add(
                container_path="/dev/x", host_path="/dev/null", permissions="r"
            )
            request.config.envs.add(key="K", value=b"v")
        elif call in ("ExecSync", "Exec"):
            request.cmd.append("true")
        elif call in ("PullImage", "RemoveImage", "ImageStatus"):
            request.image.image = IMAGE if call == "ImageStatus" else f"{REGISTRY}/no/such:image"
        if "stdout" in fields:
            request.stdout = True
        return request

    def send(self, message: Message) -> tuple[str, str, Any]:
        """Send a message; return the status code's name, the error message, and the answer (of a
        stream the last one)."""
        method = calls()[message.call]
        channel = self.server.channel
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer_type = getattr(api, method.output_type.name)
        call = make(
            f"/{method.containing_service.full_name}/{method.name}",
            response_deserializer=answer_type.FromString,
        )
        timeout_s = EVENTS_S if message.call == "GetContainerEvents" else RPC_TIMEOUT_S
        try:
            answer = call(message.wire, timeout=timeout_s)
            if method.server_streaming:
                for each in answer:
                    answer = each
        except grpc.RpcError as error:
            return error.code().name, str(error.details()), None  # type: ignore[attr-defined]
        return "OK", "", answer

    def follow(self, message: Message, answer: Any) -> None:
        """Let later messages name the pod or container that the answer reports; remove the oldest
        ones beyond `KEPT`, and replace removed ones."""
        things = self.things
        if message.call == "RunPodSandbox":
            self._keep(things.pods, self.made_pods, answer.pod_sandbox_id, self.server.remove_pod)
        elif message.call == "CreateContainer":
            self._keep(
                things.containers,
                self.made_containers,
                answer.container_id,
                self.server.remove_container,
            )
        elif message.call in (*DESTRUCTIVE, "UpdateContainerResources"):
            self.refill()
        elif message.call == "RemoveImage":
            status_request = api.ImageStatusRequest(image=api.ImageSpec(image=IMAGE))
            if not self.server.image.ImageStatus(status_request, timeout=RPC_TIMEOUT_S).HasField(
                "image"
            ):
                self.server.load_image()

    @staticmethod
    def _keep(ids: list[str], kept_ids: list[str], identifier: str, remove: Any) -> None:
        if identifier in ids:  # a retry of an earlier request
            return
        ids.append(identifier)
        kept_ids.append(identifier)
        alive = [each for each in kept_ids if each in ids]
        for old in alive[:-KEPT]:
            remove(old)
            ids.remove(old)

    def left(self) -> dict[str, list[str]]:
        """Return a dict: folder -> names in it, of the server's folders of pods and containers."""
        below = ("sandboxes", "containers", "pods")
        folders = [f / name for f in (self.server.root, self.server.state) for name in below]
        return {str(f): sorted(os.listdir(f)) for f in folders if f.is_dir()}


@pytest.mark.requirement("14.2")
@pytest.mark.timeout(600)
def test_any_message_gets_a_reply(server: Server) -> None:
    log_at = server.log.stat().st_size
    world = World(server)
    server.remove_all()  # the mount of the image stays
    descriptors = open_descriptors(server) + IDLE_WORKERS
    world.refill()
    codes: Counter[str] = Counter()
    wrong: list[str] = []
    memory_kib = 0
    messages = iter(Generator(SEED, world.things, world.base))
    for number in range(MESSAGES):
        if number == MESSAGES // 4:  # one-time loads and tables with a limit are done
            memory_kib = private_kib(server)
        message = next(messages)
        code, text, answer = world.send(message)
        codes[f"{message.call} {code}"] += 1
        if not fits(message, code, text):
            wrong.append(
                f"{number}: {message.call}: {code}: {text[:300]}\n{str(message.parsed)[:1500]}"
            )
        if code == "OK":
            world.follow(message, answer)
    print(*sorted(codes.items()), sep="\n")
    assert not wrong, f"seed {SEED}, {len(wrong)} of {MESSAGES}:\n" + "\n".join(wrong[:40])
    assert {each.split()[0] for each in codes} == set(calls())
    assert private_kib(server) - memory_kib < GROWTH_LIMIT_KIB
    server.remove_all()
    assert world.left() == {folder: [] for folder in world.left()}
    assert wait_until(lambda: open_descriptors(server) <= descriptors, 30), (
        open_descriptors(server) - descriptors
    )
    assert "Traceback" not in server.log.read_bytes()[log_at:].decode(errors="replace")


def fits(message: Message, code: str, text: str) -> bool:
    if code in DOCUMENTED:
        return True
    if message.parsed is None:  # "Error parsing request proto" in grpc/doc/statuscodes.md
        return code == "INTERNAL" and "cannot be decoded" in text
    if message.call == "GetContainerEvents":
        return code == "DEADLINE_EXCEEDED"
    return message.call == "PullImage" and (code == "UNAVAILABLE" or text.startswith(REASONS))


def private_kib(server: Server) -> int:
    """Return the server's private memory in KiB."""
    lines = Path(f"/proc/{server.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def open_descriptors(server: Server) -> Counter[str]:
    """Return the number of the server's descriptors by target: a path, or the kind of object, such
    as "socket"."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kinds[os.readlink(link).partition(":[")[0]] += 1
    return kinds
