"""`make bench`: our server and containerd + runc in one run, side by side; prints a table of medians and ratios.

Rounds alternate between the two, so that the machine's noise hits both. A ratio below 1 means that we are faster; it is the
figure to quote, the milliseconds belong to this machine and this hour. BENCH='--pods 30 --parallel 4' and so on.
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

from tests.bench.load import Bench
from tests.bench.peer import Containerd, pause_archive
from tests.support import images
from tests.support.cluster import Node

IMAGE = "docker.io/library/busybox:latest"


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The CRI sockets of containerd and of ours, each in a network namespace of its own."""
    archive = images.busybox()
    names = [f"bench-{side}-{os.getpid()}" for side in ("peer", "ours")]
    with contextlib.ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        peer = Containerd(folder / "peer", names[0])
        stack.callback(peer.stop)
        peer.start([archive, pause_archive(folder)])
        node = Node(folder / "ours", names[1])
        node.folder.mkdir(parents=True)
        node.write_configuration()
        stack.callback(node.server.stop)
        node.start_server()
        node.load(archive)
        yield peer.socket, node.socket


def table(benches: list[Bench]) -> list[str]:
    """Markdown rows: step, the peer's median, ours, ours divided by the peer's."""
    peer, ours = benches
    lines = [f"| p50 | {peer.name} | {ours.name} | ratio |", "|---|---|---|---|"]
    for unit, group in ((" ms", "samples"), ("", "rates")):
        for step in getattr(peer, group):
            theirs, own = (statistics.median(getattr(b, group)[step]) for b in benches)
            lines.append(f"| {step} | {theirs:.2f}{unit} | {own:.2f}{unit} | {own / theirs:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=20, help="pods of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=1, help="pods that go up at once")
    parser.add_argument("--json", type=Path, help="write all medians to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        with servers(folder) as (peer, ours):
            benches = [
                Bench("containerd + runc", peer, IMAGE, folder / "p"),
                Bench("pyrunc", ours, IMAGE, folder / "o"),
            ]
            for bench in benches:
                bench.round(f"warm{os.getpid()}", 2, 1)
                bench.forget()
            for number in range(options.rounds):
                for bench in benches:
                    bench.round(f"b{os.getpid()}-{number}", options.pods, options.parallel)
            report(benches, options.pods, options.rounds, options.parallel)
            if options.json:
                medians = {
                    b.name: {k: statistics.median(v) for k, v in {**b.samples, **b.rates}.items()}
                    for b in benches
                }
                options.json.write_text(json.dumps(medians, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(benches: list[Bench], pods: int, rounds: int, parallel: int) -> None:
    """What was run, where and when, and the table."""
    versions = ", ".join(b.version for b in benches)
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}: {versions}"
    )
    print(f"{pods} pods x {rounds} rounds, {parallel} at once, requests like kubelet's\n")
    print("\n".join(table(benches)))


if __name__ == "__main__":
    main()
