"""`make bench-pods N=150`: measures the cost of N idle pods on each server, one server after the
other.

The figures are lists and statistics, memory, exec probes, and the time that a killed server needs
until it lists all pods again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import grpc

from cri_server.api import api_pb2 as api
from tests.bench import servers
from tests.bench.load import QUIET_S, Bench, busy_seconds
from tests.bench.tables import Row, table, where
from tests.support.cri import Client

PARALLEL, CALLS, PROBES = 8, 20, 200
Figures = dict[str, tuple[float, str]]
"""What was measured -> value, unit."""


def measure(bench: Bench, pods: int, label: str) -> Figures:
    """Start `pods` pods, measure, and remove them; return the figures."""
    with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
        bench.round(f"{label}-warm", PARALLEL, PARALLEL)
        bench.forget()
        before_kib = bench.idle()
        running = list(pool.map(bench.up, [f"{label}-{i}" for i in range(pods)]))
        try:
            return _figures(bench, pods, running, before_kib)
        finally:
            list(pool.map(bench.down, running))


def _figures(bench: Bench, pods: int, running: list[tuple[str, str]], before_kib: int) -> Figures:
    figures: Figures = {}
    for _ in range(CALLS):
        bench.relist()
        bench.measure()
    for step in ("ListPodSandbox", "ListContainers", "ListContainerStats", "ListPodSandboxStats"):
        if bench.samples[step]:
            figures[step] = statistics.median(bench.samples[step]), "ms"
    time.sleep(QUIET_S)
    figures["private memory per quiet pod"] = (bench.private_kib() - before_kib) / pods, "KiB"
    cpu = busy_seconds()
    for number in range(PROBES):
        bench.ask(running[number % pods])
    figures["CPU of an exec probe"] = (busy_seconds() - cpu) * 1e3 / PROBES, "ms"
    begin = time.perf_counter()
    bench.server.kill_and_launch()
    figures["kill -9 to the first complete list"] = _until_listed(bench, pods, begin), "ms"
    return figures


def _until_listed(bench: Bench, pods: int, begin: float) -> float:
    """Return the milliseconds from `begin` until the server lists all pods as ready again."""
    request = api.ListPodSandboxRequest(
        filter=api.PodSandboxFilter(state=api.PodSandboxStateValue(state=api.SANDBOX_READY))
    )
    while True:
        try:
            # a refused channel would wait for a second
            with Client(bench.server.socket) as client:
                if len(client.runtime.ListPodSandbox(request, timeout=10).items) >= pods:
                    return (time.perf_counter() - begin) * 1e3
        except grpc.RpcError:
            pass
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pods", type=int, nargs="?", default=150)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        with servers.running(folder) as running:
            benches = [Bench(server, folder / f"load-{server.namespace}") for server in running]
            theirs, ours = (measure(bench, options.pods, f"n{os.getpid()}") for bench in benches)
            rows = [
                Row(what, (theirs[what][0], value), unit)
                for what, (value, unit) in ours.items()
                if what in theirs
            ]
            print(f"{where([bench.version for bench in benches])}\n{options.pods} idle pods\n")
            print("\n".join(table([b.name for b in benches], rows)))
            for what in ours.keys() - theirs.keys():
                print(f"\n{what}: {ours[what][0]:.0f} {ours[what][1]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
