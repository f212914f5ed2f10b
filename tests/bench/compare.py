"""`make bench`: compares containerd + runc, CRI-O + crun and our server in one run: medians and
ratios.

Rounds alternate between the three, so that the machine's noise hits all of them. The figure to
quote is the ratio: below 1, ours is faster. First one pod at a time, then several at once. The
result is kept as JSON, from which `make figures` fills the README. Options are words of BENCH:
BENCH='--pods 30 --parallel 4 --servers containerd,pyrunc'.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench import servers
from tests.bench.load import Bench
from tests.bench.tables import Result, Row, medians, table, where

RESULT = Path("build/figures/bench.json")
STEPS = (
    "RunPodSandbox",
    "CreateContainer",
    "StartContainer",
    "pod up",
    "ExecSync",
    "StopContainer",
    "RemoveContainer",
    "StopPodSandbox",
    "RemovePodSandbox",
    "pod down",
)
LISTS = (
    "ListPodSandbox",
    "ListContainers",
    "ContainerStatus",
    "ListContainerStats",
    "ListPodSandboxStats",
)
UNITS = {
    "pods up per second": "",
    "pods down per second": "",
    "CPU of the machine per cycle": "ms",
    "private memory per pod": "KiB",
    "private memory per quiet pod": "KiB",
    "idle server and helpers, PSS": "MiB",
    "CPU per 100,000 log lines": "ms",
    "log lines per second": "",
}
THROUGHPUT = ("pods up per second", "pods down per second", "CPU of the machine per cycle")
MEMORY = (
    "private memory per pod",
    "private memory per quiet pod",
    "idle server and helpers, PSS",
)
LOGS = ("log lines per second", "CPU per 100,000 log lines")
ONE, MEMORY_TITLE, REST = "one at a time", "memory", "lists and logs"


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        with servers.running(folder, options.servers.split(",")) as running:
            groups: dict[str, Sequence[Row]] = {}
            extra: dict[str, Sequence[Row]] = {}
            for parallel in dict.fromkeys((1, options.parallel)):
                benches = [
                    Bench(server, folder / f"load-{server.namespace}-{parallel}")
                    for server in running
                ]
                alternate(benches, options.pods, options.rounds, parallel)
                groups[ONE if parallel == 1 else f"{parallel} at once"] = pods(benches)
                extra = extra or others(benches)
            what = f"{options.pods} pods x {options.rounds} rounds, requests like kubelet's"
            names, versions = [b.name for b in benches], [b.version for b in benches]
            result = Result(names, versions, where(versions), what, groups | extra)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.write(options.json)
    print(f"{result.where}\n{result.what}")
    for title, rows in result.groups.items():
        print("\n".join(["", f"{title}:", "", *table(names, rows)]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=20, help="pods of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--parallel", type=int, default=8, help="pods that go up at once in the second half"
    )
    parser.add_argument(
        "--servers", default=",".join(servers.ALL), help="which to run, ours the last"
    )
    parser.add_argument("--json", type=Path, default=RESULT, help="write the result to this file")
    return parser.parse_args()


def alternate(benches: list[Bench], pods: int, rounds: int, parallel: int) -> None:
    """Measure the servers in turns: a warm-up of each, then `rounds` rounds of `pods` pods,
    `parallel` pods at a time. If `parallel` is 1, then also measure all servers at the same time
    without pods and with quiet pods, and in turns with a pod that logs."""
    for bench in benches:
        bench.round(f"warm{parallel}-{os.getpid()}", 2, 1)
        bench.forget()
    for number in range(rounds):
        for bench in benches:
            bench.round(f"b{parallel}-{os.getpid()}-{number}", pods, parallel)
    if parallel == 1:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda bench: bench.rest(f"rest-{os.getpid()}", pods), benches))
        for number in range(rounds):
            for bench in benches:
                bench.log(f"log-{os.getpid()}-{number}")


def others(benches: list[Bench]) -> dict[str, Sequence[Row]]:
    """Return a dict: title of a table -> its rows, of the figures that are measured only with one
    pod at a time."""
    samples = [bench.samples for bench in benches]
    return {
        MEMORY_TITLE: rates(benches, MEMORY),
        REST: [*medians(samples, LISTS, "ms"), *rates(benches, LOGS)],
    }


def pods(benches: list[Bench]) -> list[Row]:
    """Return rows for the steps of a pod's life, pods per second, and CPU time."""
    return [
        *medians([bench.samples for bench in benches], STEPS, "ms"),
        *rates(benches, THROUGHPUT),
    ]


def rates(benches: list[Bench], steps: Sequence[str]) -> list[Row]:
    """Return a row for each of the rates `steps`, with its unit."""
    samples = [bench.rates for bench in benches]
    return [row for step in steps for row in medians(samples, [step], UNITS[step])]


if __name__ == "__main__":
    main()
