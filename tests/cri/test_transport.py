"""Tests clients that attack the running server over its socket, while a well-behaved client is
served.

tests/unit/http2 and tests/unit/rpc test the cost of one connection. These tests measure the
server's memory and descriptors, and the time that other clients wait.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import hpack
import pytest

from cri_server.api import api_pb2 as api
from cri_server.http2 import frames
from cri_server.http2.frames import END_HEADERS, END_STREAM, ErrorCode, head
from cri_server.rpc import grpc_framing
from tests.cri.server_harness import Server, code_of
from tests.support.processes import wait_until

HELLO = frames.PREFACE + frames.settings({})
PATH = "/runtime.v1.RuntimeService/"
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("content-type", "application/grpc"),
]
# The wait of others meanwhile, 95th percentile and maximum; the measuring client shares an
# interpreter with the attackers.
WAIT_LIMIT_S, LONGEST_WAIT_S = 0.2, 3.0
GROWTH_LIMIT_KIB = 96 << 10
LARGE_ANSWER = ["sh", "-c", f"head -c {15 << 20} /dev/zero"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(network=False) as server:
        server.load_image()
        container = server.launch(server.run_pod(host_network=True))
        keep_launches(server, container, ["true"], ["ps"], LARGE_ANSWER)
        yield server


def keep_launches(server: Server, container: str, *commands: list[str]) -> None:
    """Run each command twice, so that the server caches its compiled programs and their descriptors
    before descriptors are counted."""
    for command in commands * 2:
        server.exec(container, *command)


class Witness:
    """A client that makes calls all the time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.waits_s: list[float] = []
        self.errors: list[str] = []

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.005):
            begin = time.monotonic()
            try:
                assert len(self._server.containers()) == 1
            except (grpc.RpcError, AssertionError) as error:
                self.errors.append(str(error))
            self.waits_s.append(time.monotonic() - begin)


@contextlib.contextmanager
def served(server: Server) -> Iterator[None]:
    """Check that another client is answered in time during the block, and that the server's memory
    and descriptors do not grow."""
    server.containers()
    descriptors, memory_kib = count_descriptors(server), resident_kib(server)
    with Witness(server) as witness:
        begin = time.monotonic()
        yield
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begin)))
    assert not witness.errors, witness.errors[:3]
    waits = sorted(witness.waits_s)
    assert waits[len(waits) * 95 // 100] < WAIT_LIMIT_S and waits[-1] < LONGEST_WAIT_S, (
        len(waits),
        waits[-5:],
    )
    assert wait_until(lambda: count_descriptors(server) <= descriptors, 60), count_descriptors(
        server
    )
    assert resident_kib(server) - memory_kib < GROWTH_LIMIT_KIB
    assert "Traceback" not in server.log.read_text()


def count_descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def open_files(server: Server) -> list[str]:
    """Return the targets of the server's descriptors."""
    numbers = []
    for entry in os.scandir(f"/proc/{server.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            numbers.append(os.readlink(entry))
    return numbers


def count_deleted(server: Server) -> int:
    """Return the number of the server's open files without a name, such as large outputs on their
    way."""
    return sum("(deleted)" in name for name in open_files(server))


def resident_kib(server: Server, field: str = "VmRSS") -> int:
    """Return a field of the server's /proc/PID/status in KiB: `VmRSS` is its resident memory now,
    `VmHWM` the highest since `reset_peak`."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def reset_peak(server: Server) -> None:
    """Reset VmHWM, the server's peak memory (proc(5), clear_refs)."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


class Client:
    """Sends raw bytes over a connection to the server."""

    def __init__(self, server: Server, greeting: bytes = HELLO) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(server.socket))
        self.socket.settimeout(60)
        self.encoder = hpack.Encoder()
        self.received = bytearray()
        self.send(greeting)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; return False when the server has closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def call(self, stream_id: int, name: str, message: bytes = b"") -> bytes:
        block = self.block(name)
        body = grpc_framing.message(message)
        return (
            head(len(block), frames.HEADERS, END_HEADERS, stream_id)
            + block
            + head(len(body), frames.DATA, END_STREAM, stream_id)
            + body
        )

    def block(self, name: str) -> bytes:
        return bytes(self.encoder.encode([*FIELDS[:3], (":path", PATH + name), FIELDS[3]]))

    def parting(self) -> ErrorCode | None:
        """Read until the server closes the connection; return the code of its GOAWAY."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 20):
                self.received += data
        code, at = None, 0
        while at + frames.HEAD_BYTES <= len(self.received):
            high, low, kind, _, _ = frames.HEAD.unpack_from(self.received, at)
            at += frames.HEAD_BYTES + (high << 8 | low)
            if kind == frames.GOAWAY:
                code = ErrorCode(
                    int.from_bytes(self.received[at - (high << 8 | low) + 4 :][:4], "big")
                )
        return code


def rapid_resets(client: Client, number: int) -> bytes:
    stream_id = 2 * number + 1
    return client.call(stream_id, "ListContainers") + frames.rst_stream(stream_id, ErrorCode.CANCEL)


def continuations(client: Client, number: int) -> bytes:
    if not number:
        return head(0, frames.HEADERS, 0, 1)
    return head(1, frames.CONTINUATION, 0, 1) + b"\x82"


def headers_without_end(client: Client, number: int) -> bytes:
    return head(16384, frames.CONTINUATION if number else frames.HEADERS, 0, 1) + b"\x82" * 16384


def pings(client: Client, number: int) -> bytes:
    return head(8, frames.PING, 0, 0) + bytes(8)


def settings_frames(client: Client, number: int) -> bytes:
    return frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: number})


def empty_data(client: Client, number: int) -> bytes:
    begin = b""
    if not number:
        block = client.block("Version")
        begin = head(len(block), frames.HEADERS, END_HEADERS, 1) + block
    return begin + head(0, frames.DATA, 0, 1)


def tiny_windows(client: Client, number: int) -> bytes:
    return frames.window_update(0, 1)


FLOODS = [
    rapid_resets,
    continuations,
    headers_without_end,
    pings,
    settings_frames,
    empty_data,
    tiny_windows,
]


@pytest.mark.parametrize("flood", FLOODS)
def test_a_connection_with_a_flood_is_closed(
    server: Server, flood: Callable[[Client, int], bytes]
) -> None:
    """The server closes each of many connections long before its flood is over."""
    with served(server):
        for _ in range(5):
            with Client(server) as client:
                part = b""
                for number in range(100_000):
                    part += flood(client, number)
                    if len(part) > 8192 or not number:
                        if not client.send(part):
                            break
                        part = b""
                else:
                    raise AssertionError("all of it was taken")
                assert client.parting() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_header_bomb_is_refused(server: Server) -> None:
    """Requests that refer to one large header entry thousands of times are refused one by one, and
    a good request on the same connection succeeds."""
    with served(server), Client(server) as client:
        for stream_id in range(1, 201, 2):
            block = client.block("Version") + client.encoder.encode([("x-bomb", "x" * 4000)])
            block += b"\xbe" * 12_000  # the newest entry again and again: 48 MB of headers
            if not client.send(
                head(len(block), frames.HEADERS, END_HEADERS | END_STREAM, stream_id) + block
            ):
                break
        assert client.send(client.call(203, "Version"))
        client.socket.shutdown(socket.SHUT_WR)
        assert client.parting() is None
        assert client.received.count(b"the headers exceed") == 100
        assert grpc_framing.OK_BLOCK in client.received


def test_garbage_does_not_disturb_the_server(server: Server) -> None:
    chance = random.Random(16)
    before = server.log.read_text().count("closing a client")
    with served(server):
        for _ in range(300):
            with Client(server, chance.randbytes(chance.randrange(24, 4000))) as client:
                client.parting()
    assert server.log.read_text().count("closing a client") - before <= 5


def test_frames_with_flipped_bits_do_not_disturb_the_server(server: Server) -> None:
    chance = random.Random(61)
    with served(server):
        for _ in range(200):
            with Client(server) as client:
                wires = bytearray(
                    b"".join(client.call(n, "ListContainers") for n in range(1, 21, 2))
                )
                for _ in range(chance.randrange(1, 6)):
                    wires[chance.randrange(len(wires))] ^= 1 << chance.randrange(8)
                client.send(bytes(wires))
                client.socket.shutdown(socket.SHUT_WR)
                client.parting()


def test_clients_with_zero_windows_do_not_disturb_the_server(server: Server) -> None:
    """If the clients of many connections accept no byte of their answers, the server stores the
    answers, and nothing more."""
    greeting = frames.PREFACE + frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: 0})
    with served(server), contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(Client(server, greeting))
            for number in range(1, 1801, 2):  # within the limit of streams
                client.send(client.call(number, "ListContainers"))


def test_clients_that_never_read_do_not_disturb_the_server(server: Server) -> None:
    """The server stops reading from a client whose socket is full, or closes the connection."""
    with served(server), contextlib.ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(Client(server))
            client.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                for number in range(1, 100_000, 2):
                    client.socket.sendall(client.call(number, "ListContainers"))
                raise AssertionError("all of it was taken")


def test_event_streams_that_are_not_read_do_not_disturb_the_server(server: Server) -> None:
    with served(server), contextlib.ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(Client(server))
            client.send(client.call(1, "GetContainerEvents"))
        container = server.containers()[0]
        for _ in range(5):
            assert server.exec(container.id, "true").exit_code == 0


def test_half_open_connections_do_not_disturb_others(server: Server) -> None:
    with served(server), contextlib.ExitStack() as stack:
        for number in range(200):
            # Some clients send nothing, others a part of a frame.
            client = stack.enter_context(Client(server, HELLO[: number % (len(HELLO) + 1)]))
            if number % (len(HELLO) + 1) == len(HELLO):
                client.send(client.call(1, "ListContainers")[: number % 60])
        time.sleep(2)


def test_thousands_of_idle_connections_make_room_for_others(server: Server) -> None:
    """At the limit the server closes the connection that has been idle longest, so that active
    clients can connect."""
    count = 3000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard > count + 500
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    try:
        with served(server), contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(Client(server))
            assert count_descriptors(server) < 1200
            with grpc.insecure_channel(f"unix://{server.socket}", options=[("late", 1)]) as late:
                version = late.unary_unary(
                    f"{PATH}Version", request_serializer=bytes, response_deserializer=bytes
                )
                assert version(b"", timeout=60, wait_for_ready=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "connections are the limit" in server.log.read_text()


def test_many_attackers_at_once_do_not_disturb_the_server(server: Server) -> None:
    with served(server):
        threads = [
            threading.Thread(target=_flood_until_ended, args=(server, flood))
            for flood in FLOODS
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _flood_until_ended(server: Server, flood: Callable[[Client, int], bytes]) -> None:
    with Client(server) as client:
        for number in range(100_000):
            if not client.send(flood(client, number)):
                return


# ---- well-behaved clients


@pytest.mark.requirement("1.3")
def test_large_messages_pass_in_both_directions(server: Server) -> None:
    """A request with an id of 16 MiB and a reply with 15 MiB of output arrive whole."""
    wrong = api.ContainerStatusRequest(container_id="x" * ((16 << 20) - 100))
    assert (
        code_of(lambda: server.runtime.ContainerStatus(wrong, timeout=60))
        == grpc.StatusCode.NOT_FOUND
    )
    container = server.containers()[0].id
    answer = server.exec(container, "sh", "-c", f"head -c {15 << 20} /dev/zero")
    assert answer.exit_code == 0 and len(answer.stdout) == 15 << 20


def test_many_large_answers_at_once_arrive_whole(server: Server) -> None:
    """Two dozen outputs of the largest size on one connection, like kubelet's, arrive whole and
    cost little memory."""
    container = server.containers()[0].id
    command = ["sh", "-c", f"head -c {15 << 20} /dev/zero; echo end >&2"]
    request = api.ExecSyncRequest(container_id=container, cmd=command, timeout=120)
    before_kib = resident_kib(server)
    reset_peak(server)
    with Witness(server) as witness:  # on the same connection
        calls = [server.runtime.ExecSync.future(request, timeout=120) for _ in range(24)]
        answers = [call.result() for call in calls]
    assert not witness.errors, witness.errors[:3]
    assert {(len(a.stdout), a.stderr, a.exit_code) for a in answers} == {(15 << 20, b"end\n", 0)}
    assert resident_kib(server, "VmHWM") - before_kib < GROWTH_LIMIT_KIB
    assert "does not read" not in server.log.read_text()


def test_large_answers_that_are_not_read_cost_little(server: Server) -> None:
    """The server keeps the connection of a client that reads no answers, and discards the answers
    when the client closes it."""
    container = server.containers()[0].id
    request = api.ExecSyncRequest(container_id=container, cmd=LARGE_ANSWER, timeout=120)
    before_kib, descriptors = resident_kib(server), count_descriptors(server)
    deleted = count_deleted(server)
    reset_peak(server)
    with Client(server) as client:
        for number in range(1, 49, 2):
            client.send(client.call(number, "ExecSync", request.SerializeToString()))
        assert wait_until(lambda: count_deleted(server) - deleted == 24, 120)
        assert wait_until(lambda: "head" not in server.output(container, "ps"), 120)
    assert wait_until(lambda: count_descriptors(server) <= descriptors, 60), open_files(server)
    assert resident_kib(server, "VmHWM") - before_kib < GROWTH_LIMIT_KIB


@pytest.mark.requirement("1.6")
def test_hundreds_of_calls_are_answered_at_once(server: Server) -> None:
    """While 100 execs run, 700 other calls are answered."""
    container = server.containers()[0].id
    server.output(container, "mkfifo", "/gate")
    request = api.ExecSyncRequest(container_id=container, cmd=["cat", "/gate"], timeout=120)
    execs = [server.runtime.ExecSync.future(request, timeout=120) for _ in range(100)]
    assert wait_until(lambda: server.output(container, "ps").count("cat /gate") == len(execs), 60)
    status_request = api.ContainerStatusRequest(container_id=container)
    for call in [
        server.runtime.ContainerStatus.future(status_request, timeout=60) for _ in range(700)
    ]:
        call.result()
    assert not any(call.done() for call in execs)
    server.output(container, "sh", "-c", ": >/gate")
    for call in execs:
        assert call.result().exit_code == 0


@pytest.mark.requirement("1.7")
def test_cancelled_calls_end_their_work(server: Server) -> None:
    """The process of a cancelled ExecSync ends, and the connection continues."""
    container = server.containers()[0].id
    request = api.ExecSyncRequest(container_id=container, cmd=["sleep", "987"], timeout=60)
    calls = [server.runtime.ExecSync.future(request, timeout=60) for _ in range(10)]
    wait_until(lambda: server.output(container, "ps").count("sleep 987") == 10, 60)
    for call in calls:
        call.cancel()
    assert wait_until(lambda: "sleep 987" not in server.output(container, "ps"), 60)


def test_cached_messages_follow_the_state(server: Server) -> None:
    """Lists and statuses, which are cached separately, agree throughout a container's life."""
    pod = server.run_pod(host_network=True)
    try:
        config = server.container_config(labels={"a": "b"}, annotations={"c": "d"})
        container = server.create(pod, config)
        seen = [_state(server, pod, container)]
        server.start_container(container)
        seen.append(_state(server, pod, container))
        limits = api.LinuxContainerResources(cpu_shares=77)
        change = api.UpdateContainerResourcesRequest(container_id=container, linux=limits)
        server.runtime.UpdateContainerResources(change, timeout=10)
        assert server.status(container).resources.linux.cpu_shares == 77
        server.stop_container(container)
        seen.append(_state(server, pod, container))
        assert seen == [api.CONTAINER_CREATED, api.CONTAINER_RUNNING, api.CONTAINER_EXITED]
        assert server.status(container).exit_code == 137 and server.status(container).finished_at
        assert [p.state for p in server.pods(id=pod)] == [api.SANDBOX_READY]
        server.stop_pod(pod)
        assert (
            [p.state for p in server.pods(id=pod)]
            == [api.SANDBOX_NOTREADY]
            == [server.pod_status(pod).state]
        )
    finally:
        server.stop_pod(pod)
        server.remove_pod(pod)
    assert not server.pods(id=pod)


def _state(server: Server, pod: str, container: str) -> int:
    """Return the container's state. All replies must agree on it and on its other fields."""
    status = server.status(container)
    verbose = api.ContainerStatusRequest(container_id=container, verbose=True)
    assert server.runtime.ContainerStatus(verbose, timeout=10).status == status
    (listed,) = server.containers(id=container)
    request = api.StreamContainersRequest(filter=api.ContainerFilter(id=container))
    ((streamed,),) = [m.containers for m in server.runtime.StreamContainers(request, timeout=10)]
    of_pod = server.runtime.PodSandboxStatus(
        api.PodSandboxStatusRequest(pod_sandbox_id=pod), timeout=10
    )
    assert of_pod.timestamp and list(of_pod.containers_statuses) == [status] and streamed == listed
    for field in (
        "id",
        "metadata",
        "state",
        "created_at",
        "labels",
        "annotations",
        "image_ref",
        "image_id",
    ):
        assert getattr(listed, field) == getattr(status, field), field
    return int(status.state)
