"""`make bench`: our server and containerd + runc in one run, side by side; prints a table of medians and ratios.

Rounds alternate between the two, so that the machine's noise hits both. A ratio below 1 means that we are faster; it is the
figure to quote, the milliseconds belong to this machine and this hour. First one pod at a time, then several at once.
BENCH='--pods 30 --parallel 4 --svg FILE' and so on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import chart
from tests.bench.load import Bench
from tests.bench.peer import Containerd, pause_archive
from tests.support import images
from tests.support.cluster import Node

IMAGE = "docker.io/library/busybox:latest"


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[Containerd, Node]]:
    """containerd and ours, each in a network namespace of its own; images on the disk that is there, state on a tmpfs, as
    /run is one.
    """
    archive = images.busybox()
    names = [f"bench-{side}-{os.getpid()}" for side in ("peer", "ours")]
    with contextlib.ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        for side in ("peer", "ours"):
            state = folder / side / "state"
            state.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "state", state], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(state)], check=False)
        peer = Containerd(folder / "peer", names[0])
        stack.callback(peer.stop)
        peer.start([archive, pause_archive(folder)])
        node = Node(folder / "ours", names[1])
        node.write_configuration()
        stack.callback(node.server.stop)
        node.start_server()
        node.load(archive)
        yield peer, node


Row = tuple[str, float, float, str]
"""Step, the peer's median, ours, unit."""


def rows(benches: list[Bench], only: tuple[str, ...] = (), suffix: str = "") -> list[Row]:
    """A row per step and rate that both sides have; `only` these, if any are named."""
    found = []
    for unit, group in ((" ms", "samples"), ("", "rates")):
        for step in getattr(benches[0], group):
            if step in getattr(benches[1], group) and (not only or step in only):
                theirs, own = (statistics.median(getattr(b, group)[step]) for b in benches)
                found.append((step + suffix, theirs, own, unit))
    return found


def table(names: list[str], found: list[Row]) -> list[str]:
    """Markdown rows: step, the peer's median, ours, ours divided by the peer's."""
    lines = [f"| p50 | {names[0]} | {names[1]} | ratio |", "|---|---|---|---|"]
    return lines + [f"| {s} | {p:.2f}{unit} | {o:.2f}{unit} | {o / p:.3f} |" for s, p, o, unit in found]


TOGETHER = (
    "RunPodSandbox",
    "CreateContainer",
    "StartContainer",
    "pod up",
    "pods up per second",
    "CPU ms per cycle",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=20, help="pods of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=8, help="pods that go up at once in the second half")
    parser.add_argument("--json", type=Path, help="write all medians to this file")
    parser.add_argument("--svg", type=Path, help="draw the ratios into this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        with servers(folder) as (peer, ours):
            sides = [("containerd + runc", peer.socket, folder / "p"), ("pyrunc", ours.socket, folder / "o")]
            found: list[Row] = []
            for parallel in dict.fromkeys((1, options.parallel)):
                benches = [Bench(name, socket, IMAGE, place / str(parallel)) for name, socket, place in sides]
                alternate(benches, options.pods, options.rounds, parallel)
                only, suffix = ((), "") if parallel == 1 else (TOGETHER, f", {parallel} at once")
                found += rows(benches, only, suffix)
            report(benches, found, f"{options.pods} pods x {options.rounds} rounds")
            if options.json:
                options.json.write_text(
                    json.dumps({step: {"peer": p, "ours": o} for step, p, o, _ in found}, indent=1)
                )
            if options.svg:
                ratios = [(step, own / theirs) for step, theirs, own, unit in found if unit or "KiB" in step]
                options.svg.write_text(
                    chart.svg("pyrunc, where containerd + runc takes 1", where(benches), ratios)
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def alternate(benches: list[Bench], pods: int, rounds: int, parallel: int) -> None:
    """A warm-up of each, then rounds in turn; at the end of those one by one, pods that rest and pods that log."""
    for bench in benches:
        bench.round(f"warm{parallel}-{os.getpid()}", 2, 1)
        bench.forget()
    for number in range(rounds):
        for bench in benches:
            bench.round(f"b{parallel}-{os.getpid()}-{number}", pods, parallel)
    if parallel == 1:
        for bench in benches:
            bench.rest(f"rest-{os.getpid()}", pods)
        for number in range(rounds):
            for bench in benches:
                bench.log(f"log-{os.getpid()}-{number}")


def where(benches: list[Bench]) -> str:
    """When and on what it was run."""
    versions = ", ".join(b.version for b in benches)
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{time.strftime('%Y-%m-%d')}, {machine}: {versions}"


def report(benches: list[Bench], found: list[Row], what: str) -> None:
    """What was run, where and when, and the table."""
    print(f"{where(benches)}\n{what}, requests like kubelet's\n")
    print("\n".join(table([b.name for b in benches], found)))


if __name__ == "__main__":
    main()
