"""Compares our gRPC server with grpcio's two, with the same handler and messages: CPU time of the
server process for each call.

We keep our transport only as long as it is cheaper. Rounds alternate between the servers. Each
server is a separate process with one client on one connection, which makes one call after the
other, then many at once. The figure to quote is the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import grpc.aio

from cri_server.api import api_pb2 as api
from cri_server.api import api_pb2_grpc
from cri_server.rpc import methods
from cri_server.rpc.server import Server

CONTAINERS = 20
AT_ONCE = 50
Request = api.ListContainersRequest
Response = api.ListContainersResponse


def listed() -> Response:
    """Return the reply of ListContainers on a node with `CONTAINERS` containers."""
    response = Response()
    for number in range(CONTAINERS):
        container = response.containers.add(
            id=f"{number:064x}", pod_sandbox_id=f"{number:064x}", state=1
        )
        container.metadata.name = f"container-{number}"
        container.image.image = "registry.example/image:tag"
        container.labels["io.kubernetes.pod.name"] = f"pod-{number}"
        container.annotations["io.kubernetes.container.hash"] = f"{number:08x}"
    return response


LISTED = listed()


class RuntimeService:
    """The benchmark's service for our gRPC server; answers only ListContainers."""

    def ListContainers(self, request: Request) -> Response:
        return LISTED


class Servicer(api_pb2_grpc.RuntimeServiceServicer):
    """Answers ListContainers in grpcio with threads."""

    def ListContainers(self, request: Request, context: grpc.ServicerContext) -> Response:
        return LISTED


class AsyncServicer(api_pb2_grpc.RuntimeServiceServicer):
    """Answers ListContainers in grpcio with asyncio."""

    async def ListContainers(self, request: Request, context: object) -> Response:
        return LISTED


async def _serve_ours(path: Path) -> None:
    server = Server(path, methods.table(RuntimeService=RuntimeService()))
    await server.start()
    await asyncio.Event().wait()


async def _serve_grpc_aio(path: Path) -> None:
    server = grpc.aio.server()
    api_pb2_grpc.add_RuntimeServiceServicer_to_server(AsyncServicer(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


def _serve_grpc(path: Path) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(10))
    api_pb2_grpc.add_RuntimeServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{path}")
    server.start()
    server.wait_for_termination()


SERVERS: dict[str, Callable[[Path], None]] = {
    "grpcio, threads": _serve_grpc,
    "grpcio, asyncio": lambda path: asyncio.run(_serve_grpc_aio(path)),
    "pyrunc": lambda path: asyncio.run(_serve_ours(path)),
}


class Side:
    """A server in a separate process, and a client of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.samples: dict[str, list[float]] = {"one at a time": [], f"{AT_ONCE} at once": []}
        path = folder / f"{list(SERVERS).index(name)}.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--serve", name, str(path)]
        )
        self._channel = grpc.insecure_channel(f"unix:{path}")
        self._list = api_pb2_grpc.RuntimeServiceStub(self._channel).ListContainers  # type: ignore[no-untyped-call]
        assert self._list(Request(), wait_for_ready=True, timeout=60) == LISTED

    def round(self, calls: int) -> None:
        """Measure the server's CPU time per call in microseconds: first with calls one after the
        other, then with many calls at once."""
        one, many = self.samples.values()
        with self._measured(one, calls):
            for _ in range(calls):
                self._list(Request())
        with self._measured(many, calls):
            for _ in range(0, calls, AT_ONCE):
                for call in [self._list.future(Request()) for _ in range(AT_ONCE)]:
                    call.result()

    @contextlib.contextmanager
    def _measured(self, samples: list[float], calls: int) -> Iterator[None]:
        begin_ns = self._cpu_ns()
        yield
        time.sleep(0.1)  # work after the last answer belongs to the round
        samples.append((self._cpu_ns() - begin_ns) / calls / 1000)

    def _cpu_ns(self) -> int:
        """Return the CPU time of all threads in nanoseconds."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        # The first field of schedstat.
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000, help="calls of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", nargs=2, metavar=("SERVER", "SOCKET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        SERVERS[options.serve[0]](Path(options.serve[1]))
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        sides = [stack.enter_context(contextlib.closing(Side(name, folder))) for name in SERVERS]
        for side in sides:
            side.round(200)
            for samples in side.samples.values():
                samples.clear()
        for _ in range(options.rounds):
            for side in sides:
                side.round(options.calls)
        print(f"\nCPU of the gRPC server for a call, ListContainers with {CONTAINERS} containers\n")
        print("\n".join(table(sides)))


def table(sides: list[Side]) -> list[str]:
    """Return Markdown rows: medians, and ours divided by that of each other server."""
    *theirs, ours = sides
    ratios = [f"pyrunc / {side.name}" for side in theirs]
    lines = [f"| p50 | {' | '.join([*(s.name for s in sides), *ratios])} |"]
    lines.append("|---" * (1 + len(sides) + len(theirs)) + "|")
    for step in ours.samples:
        medians = [statistics.median(side.samples[step]) for side in sides]
        cells = [f"{m:.0f} µs" for m in medians] + [f"{medians[-1] / m:.2f}" for m in medians[:-1]]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
