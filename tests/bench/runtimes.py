"""`python -m tests.bench.runtimes`: compares the command lines of pyrunc, runc and crun in one run:
medians and ratios.

Rounds alternate between the runtimes, so that the machine's noise hits all of them. The figure to
quote is the ratio to runc. No process of a runtime stays between two commands. The second table is
processor time, which depends less on other work of the machine.

runc and crun are those of `make bench`. Their state is on a tmpfs, like /run on a machine that
systemd has booted. crun refuses a host with the trees of cgroup v1 and v2, so there it runs in a
mount namespace without the v2 tree; the time to enter the namespace is not counted.
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
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import bundle, crio, toolchain

SPAWN = Path(__file__).parent / "spawn.c"
UNIFIED = "/sys/fs/cgroup/unified"
COMMANDS = ("run", "create+start+delete", "exec", "state")
GOALS = {"run": 0.6, "exec": 0.7, "create+start+delete": 1.1, "state": 2.0}  # to runc


class Cost(NamedTuple):
    """Cost of one command: wall time, CPU time (with the children that it waited for), and
    memory of the largest process."""

    clock_ms: float
    processor_ms: float
    memory_mib: float


class Side:
    """A runtime under measurement: its command, its containers' folder, and its samples: wall time,
    CPU time, peak memory."""

    def __init__(
        self, name: str, program: Sequence[str], folder: Path, prefix: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.program = list(program)
        self.prefix = list(prefix)
        self.folder = folder
        self.state = folder.parent / "run" / name
        self.clock_ms: dict[str, list[float]] = {task: [] for task in COMMANDS}
        self.processor_ms: dict[str, list[float]] = {task: [] for task in COMMANDS}
        self.memory_mib: dict[str, list[float]] = {"create": [], "exec": []}
        self.spawn = folder.parent / "spawn"
        self._bundles = {name: self._bundle(name, words) for name, words in _PROGRAMS.items()}

    def _bundle(self, name: str, words: Sequence[str]) -> Path:
        config = bundle.configuration(
            *words, cgroupsPath=f"/bench-{self.name}-{name}-{os.getpid()}"
        )
        config["ociVersion"] = "1.0.0"  # Debian's crun refuses newer versions of the specification
        config["root"] = {"path": str(self.folder.parent / "root"), "readonly": True}
        folder = self.folder / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def call(self, *words: str) -> Cost:
        """Run a command and return its cost. Raises an error when it fails."""
        command = [*self.prefix, str(self.spawn), *self.program, "--root", str(self.state), *words]
        reading, writing = os.pipe()
        with open(self.folder / "output", "wb") as output:
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
                (os.POSIX_SPAWN_DUP2, writing, 3),
            ]
            child = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
            os.close(writing)
            with open(reading) as answer:
                text = answer.read()
            os.waitpid(child, 0)
        if not text.endswith(" 0\n"):
            raise RuntimeError(
                f"{' '.join(command)}: {text}\n{(self.folder / 'output').read_text()}"
            )
        clock_ns, processor_us, memory_kib, _ = map(int, text.split())
        return Cost(clock_ns / 1e6, processor_us / 1e3, memory_kib / 1024)

    def round(self, number: int) -> None:
        """Run every task once: exec and state in a running container, the others in new ones."""
        short = str(self._bundles["true"])
        self._note("run", self.call("run", "--bundle", short, f"r{number}"))
        created = self.call("create", "--bundle", short, f"c{number}")
        self._note(
            "create+start+delete",
            created,
            self.call("start", f"c{number}"),
            self.call("delete", "--force", f"c{number}"),
        )
        executed = self.call("exec", "long", "true")
        self._note("exec", executed)
        self._note("state", self.call("state", "long"))
        self.memory_mib["create"].append(created.memory_mib)
        self.memory_mib["exec"].append(executed.memory_mib)

    def _note(self, task: str, *costs: Cost) -> None:
        self.clock_ms[task].append(sum(cost.clock_ms for cost in costs))
        self.processor_ms[task].append(sum(cost.processor_ms for cost in costs))

    def forget(self) -> None:
        for samples in (self.clock_ms, self.processor_ms, self.memory_mib):
            for values in samples.values():
                values.clear()

    @contextlib.contextmanager
    def container(self) -> Iterator[None]:
        """During the `with` block, run a container called `long`."""
        self.call("run", "--detach", "--bundle", str(self._bundles["long"]), "long")
        try:
            yield
        finally:
            self.call("delete", "--force", "long")


_PROGRAMS = {"true": ("true",), "long": ("sleep", "3600")}


def build_spawn(folder: Path) -> None:
    """Compile the small program that starts all measured commands."""
    subprocess.run(["cc", "-O2", "-static", "-o", str(folder / "spawn"), str(SPAWN)], check=True)


@contextlib.contextmanager
def without_the_v2_tree() -> Iterator[list[str]]:
    """Provide the words to put before a command so that it sees only cgroup v1; none on a host
    without the trees of both versions."""
    if not os.path.ismount(UNIFIED):
        yield []
        return
    script = f"umount {UNIFIED}; echo ready; exec sleep 100000"
    namespace_process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script], stdout=subprocess.PIPE
    )
    try:
        assert (
            namespace_process.stdout is not None
            and namespace_process.stdout.readline() == b"ready\n"
        )
        yield [
            shutil.which("nsenter") or "nsenter",
            f"--mount=/proc/{namespace_process.pid}/ns/mnt",
            "--wd=.",
        ]
    finally:
        namespace_process.kill()
        namespace_process.wait()
        assert namespace_process.stdout is not None
        namespace_process.stdout.close()


@contextlib.contextmanager
def sides(folder: Path) -> Iterator[list[Side]]:
    """Provide the runtimes, each with a container that runs; runc is the first, because ratios
    refer to it."""
    with contextlib.ExitStack() as stack:
        all_sides = [
            Side("runc", [str(toolchain.peer() / "bin/runc")], folder / "runc"),
            Side("pyrunc", bundle.runtime(), folder / "pyrunc"),
        ]
        crun = [str(crio.peer() / "crun")]
        all_sides.append(
            Side("crun", crun, folder / "crun", stack.enter_context(without_the_v2_tree()))
        )
        for side in all_sides:
            stack.enter_context(side.container())
        yield all_sides


MEASURES = (
    ("clock_ms", "p50 by the clock", "ms"),
    ("processor_ms", "p50 of processor time", "ms"),
    ("memory_mib", "peak memory", "MiB"),
)


def table(all_sides: Sequence[Side], measure: str, title: str, unit: str) -> list[str]:
    """Return Markdown rows: task, medians, each one's ratio to the first, and the goal for wall
    time."""
    first, *others = all_sides
    ratios = "".join(f" {other.name} / {first.name} |" for other in others)
    lines = [
        f"| {title} | {' | '.join(side.name for side in all_sides)} |{ratios} goal |",
        "|---" * (len(all_sides) + len(others) + 2) + "|",
    ]
    for task in getattr(first, measure):
        values = [statistics.median(getattr(side, measure)[task]) for side in all_sides]
        cells = [f"{value:.1f} {unit}" for value in values] + [
            f"{value / values[0]:.2f}" for value in values[1:]
        ]
        goal = GOALS.get(task, "") if measure == "clock_ms" else ""
        lines.append(f"| {task} | {' | '.join(cells)} | {goal} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write all medians to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-runtimes-"))
    try:
        (folder / "run").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "run", str(folder / "run")], check=True)
        build_spawn(folder)
        bundle.make_root(folder / "root")
        with sides(folder) as all_sides:
            for number in range(-2, options.rounds):
                if number == 0:  # the page cache is warm now
                    for side in all_sides:
                        side.forget()
                for side in all_sides:
                    side.round(number)
    finally:
        subprocess.run(["umount", "-l", str(folder / "run")], check=False)
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()},"
        f" {options.rounds} rounds\n"
    )
    for measure in MEASURES:
        print("\n".join(table(all_sides, *measure)), "\n")
    if options.json:
        medians = {
            side.name: {
                name: {
                    task: statistics.median(values) for task, values in getattr(side, name).items()
                }
                for name, _, _ in MEASURES
            }
            for side in all_sides
        }
        options.json.write_text(json.dumps(medians, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
