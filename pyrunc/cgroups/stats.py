"""A group's usage, read from its files. What the kernel does not offer here is absent, never zero.

The words are the kernel's (cgroup-v2.rst): `usec` stays microseconds, limits of `max` are None.
"""

from __future__ import annotations

from pyrunc.kernel import cgroup as tree
from pyrunc.spec.value import Value

PRESSURE = ("cpu", "memory", "io")


class Memory(Value):
    """The files of the memory controller, in bytes; None for one that is not there, and for a limit
    of `max`. `stat` and `events`: memory.stat and memory.events, a number for each word."""

    current: int
    stat: dict[str, int]
    events: dict[str, int]
    max: int | None = None
    min: int | None = None
    peak: int | None = None
    swap_current: int | None = None
    swap_max: int | None = None


class Stats:
    """`cpu`, `memory`, `pids`: None when there are no such files; `io`, `hugetlb`: by device and by
    page size.

    cpu      usage_usec user_usec system_usec [nr_periods nr_throttled throttled_usec]      (cpu.stat, as the kernel has it)
    pids     current; max
    io       {"8:0": {rbytes wbytes rios wios …}}
    hugetlb  {"2MB": {current; max; events_max}}
    pressure {"cpu": {"some": {avg10 avg60 avg300 total}, "full": …}}      total in microseconds
    cpuset   {"cpus": "0-3,7", "mems": "0"}                                (what is in force; without the controller empty)
    """

    __slots__ = ("cpu", "cpuset", "hugetlb", "io", "memory", "pids", "pressure")

    def __init__(self) -> None:
        self.cpu: dict[str, int] | None = None
        self.memory: Memory | None = None
        self.pids: dict[str, int | None] | None = None
        self.io: dict[str, dict[str, int]] = {}
        self.hugetlb: dict[str, dict[str, int | None]] = {}
        self.pressure: dict[str, dict[str, dict[str, float]]] = {}
        self.cpuset: dict[str, str] = {}


def read(directory: str) -> Stats:
    """All that can be read of the group now; an empty Stats when it is gone."""
    found = Stats()
    cpu = tree.keyed(tree.read(directory, "cpu.stat"))
    found.cpu = cpu or None
    found.memory = _memory(directory)
    found.pids = _pids(directory)
    found.io = io_lines(tree.read(directory, "io.stat"))
    found.hugetlb = _hugetlb(directory)
    for name in PRESSURE:
        if content := tree.read(directory, f"{name}.pressure"):
            found.pressure[name] = pressure_lines(content)
    for name in ("cpus", "mems"):
        if content := tree.read(directory, f"cpuset.{name}.effective"):
            found.cpuset[name] = content.strip()
    return found


def read_usage(directory: str) -> Stats:
    """What kubelet asks for every few seconds, and no more: cpu, memory (current, limits, stat,
    swap) and pressure.

    The first file that a controller does not have answers for its others: five calls for a group
    without controllers.
    """
    found = Stats()
    found.cpu = tree.keyed(tree.read(directory, "cpu.stat")) or None
    if (current := tree.read(directory, "memory.current")) is not None:
        found.memory = Memory(
            int(current),
            stat=tree.keyed(tree.read(directory, "memory.stat")),
            events={},
            max=amount(tree.read(directory, "memory.max")),
            swap_current=amount(tree.read(directory, "memory.swap.current")),
            swap_max=amount(tree.read(directory, "memory.swap.max")),
        )
    for name in PRESSURE:
        if not (content := tree.read(directory, f"{name}.pressure")):
            break
        found.pressure[name] = pressure_lines(content)
    return found


def amount(content: str | None) -> int | None:
    """`max` -> None, no file (None) -> None, a number -> int."""
    text = (content or "max").strip()
    return None if text == "max" else int(text)


def io_lines(content: str | None) -> dict[str, dict[str, int]]:
    """`8:0 rbytes=1 wbytes=2` -> {"8:0": {"rbytes": 1, "wbytes": 2}}; a device without numbers is
    left out."""
    found = {}
    for line in (content or "").splitlines():
        device, *words = line.split()
        pairs = (word.partition("=") for word in words)
        numbers = {key: int(value) for key, _, value in pairs if value.isdigit()}
        if numbers:
            found[device] = numbers
    return found


def pressure_lines(content: str) -> dict[str, dict[str, float]]:
    """`some avg10=0.00 … total=5` -> {"some": {"avg10": 0.0, …, "total": 5}}."""
    found: dict[str, dict[str, float]] = {}
    for line in content.splitlines():
        kind, *words = line.replace("=", " ").split()
        figures: dict[str, float] = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        figures["total"] = int(words[-1])  # the last, and too large for a float one day
        found[kind] = figures
    return found


def _memory(directory: str) -> Memory | None:
    current = tree.read(directory, "memory.current")
    if current is None:
        return None
    return Memory(
        int(current),
        stat=tree.keyed(tree.read(directory, "memory.stat")),
        events=tree.keyed(tree.read(directory, "memory.events")),
        max=amount(tree.read(directory, "memory.max")),
        min=amount(tree.read(directory, "memory.min")),
        peak=amount(tree.read(directory, "memory.peak")),
        swap_current=amount(tree.read(directory, "memory.swap.current")),
        swap_max=amount(tree.read(directory, "memory.swap.max")),
    )


def _pids(directory: str) -> dict[str, int | None] | None:
    current = tree.read(directory, "pids.current")
    if current is None:
        return None
    return {"current": int(current), "max": amount(tree.read(directory, "pids.max"))}


def _hugetlb(directory: str) -> dict[str, dict[str, int | None]]:
    found = {}
    for size in huge_page_sizes():
        current = tree.read(directory, f"hugetlb.{size}.rsvd.current") or tree.read(
            directory, f"hugetlb.{size}.current"
        )
        if current is not None:
            events = tree.keyed(tree.read(directory, f"hugetlb.{size}.events"))
            found[size] = {
                "current": int(current),
                "max": amount(tree.read(directory, f"hugetlb.{size}.max")),
                "events_max": events.get("max", 0),
            }
    return found


_sizes: list[str] | None = None


def huge_page_sizes() -> list[str]:
    """The host's huge page sizes as cgroup files name them: `2MB`, `1GB`."""
    import os

    global _sizes
    if _sizes is None:
        try:
            names = os.listdir("/sys/kernel/mm/hugepages")
        except OSError:
            names = []
        _sizes = sorted(
            size_name(int(n.removeprefix("hugepages-").removesuffix("kB"))) for n in names
        )
    return _sizes


def size_name(size_kb: int) -> str:
    """2048 -> `2MB`, 1048576 -> `1GB`, 64 -> `64KB`."""
    for unit in ("KB", "MB"):
        if size_kb < 1024:
            return f"{size_kb}{unit}"
        size_kb //= 1024
    return f"{size_kb}GB"
