"""Reads a group's usage from its files. Names are the kernel's (cgroup-v2.rst). Times stay in
microseconds (`usec`). A limit of `max` is None, and a value that the kernel does not offer is
absent or None, never zero."""

from __future__ import annotations

from pyrunc.kernel import cgroup
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PRESSURE = ("cpu", "memory", "io")


class Memory(Value):
    """The numbers in the memory controller's files, in bytes. None for a missing file, and for a
    limit of `max`. `stat` and `events`: the numbers in memory.stat and memory.events, by name."""

    current: int
    stat: dict[str, int]
    events: dict[str, int]
    max: int | None = None
    min: int | None = None
    peak: int | None = None
    swap_current: int | None = None
    swap_max: int | None = None


class Stats(Value):
    """Usage of a group.

    - `cpu`: cpu.stat, in microseconds: usage_usec user_usec system_usec [nr_periods nr_throttled
      throttled_usec]; None without the file
    - `memory`: see `Memory`; None without the files
    - `pids`: current, max; None without the files
    - `io`: device -> counters: {"8:0": {rbytes wbytes rios wios …}}
    - `hugetlb`: page size -> {current max events_max}, such as {"2MB": {…}}
    - `pressure`: {"cpu": {"some": {avg10 avg60 avg300 total}, "full": …}}, total in microseconds
    - `cpuset`: the effective lists {"cpus": "0-3,7", "mems": "0"}; empty without the controller
    """

    cpu: dict[str, int] | None = None
    memory: Memory | None = None
    pids: dict[str, int | None] | None = None
    io: Mapping[str, dict[str, int]] = {}
    hugetlb: Mapping[str, dict[str, int | None]] = {}
    pressure: Mapping[str, dict[str, dict[str, float]]] = {}
    cpuset: Mapping[str, str] = {}


def read(directory: str) -> Stats:
    """Read all statistics of the group; an empty Stats when it is gone."""
    cpuset = {name: cgroup.read(directory, f"cpuset.{name}.effective") for name in ("cpus", "mems")}
    return Stats(
        _cpu(directory),
        _memory(directory, events=True),
        _pids(directory),
        io_lines(cgroup.read(directory, "io.stat")),
        _hugetlb(directory),
        _pressure(directory),
        {name: content.strip() for name, content in cpuset.items() if content},
    )


def read_usage(directory: str) -> Stats:
    """Read the statistics that kubelet asks for every few seconds: cpu, memory (current, limits,
    stat, swap) and pressure. If a controller's first file is missing, its other files are not
    read."""
    # Together with visiting each group once, this reduced the processor time of ListContainerStats
    # for 30 pods from 18.7 ms to 7.7 ms.
    return Stats(_cpu(directory), _memory(directory), pressure=_pressure(directory))


def amount(content: str | None) -> int | None:
    """Convert the content of a cgroup file to an int; None for `max` and for a missing file
    (None)."""
    text = (content or "max").strip()
    return None if text == "max" else int(text)


def io_lines(content: str | None) -> dict[str, dict[str, int]]:
    """Parse `8:0 rbytes=1 wbytes=2` to {"8:0": {"rbytes": 1, "wbytes": 2}}; a device without
    numbers is left out."""
    devices = {}
    for line in (content or "").splitlines():
        device, *words = line.split()
        pairs = (word.partition("=") for word in words)
        numbers = {key: int(value) for key, _, value in pairs if value.isdigit()}
        if numbers:
            devices[device] = numbers
    return devices


def pressure_lines(content: str) -> dict[str, dict[str, float]]:
    """Parse `some avg10=0.00 … total=5` to {"some": {"avg10": 0.0, …, "total": 5}}."""
    by_kind: dict[str, dict[str, float]] = {}
    for line in content.splitlines():
        kind, *words = line.replace("=", " ").split()
        figures: dict[str, float] = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        figures["total"] = int(words[-1])  # the last; may become too large for a float
        by_kind[kind] = figures
    return by_kind


def _cpu(directory: str) -> dict[str, int] | None:
    return cgroup.keyed(cgroup.read(directory, "cpu.stat")) or None


def _pressure(directory: str) -> dict[str, dict[str, dict[str, float]]]:
    pressure = {}
    for name in PRESSURE:
        # PSI is off for the whole machine (psi=0) or for the group (cgroup.pressure), so the other
        # two are missing as well.
        if not (content := cgroup.read(directory, f"{name}.pressure")):
            break
        pressure[name] = pressure_lines(content)
    return pressure


def _memory(directory: str, *, events: bool = False) -> Memory | None:
    """Read the memory controller's files; with `events` also memory.events, memory.min and
    memory.peak. None without the controller."""
    current = cgroup.read(directory, "memory.current")
    if current is None:
        return None

    def limit(file: str) -> int | None:
        return amount(cgroup.read(directory, file))

    return Memory(
        int(current),
        stat=cgroup.keyed(cgroup.read(directory, "memory.stat")),
        events=cgroup.keyed(cgroup.read(directory, "memory.events")) if events else {},
        max=limit("memory.max"),
        min=limit("memory.min") if events else None,
        peak=limit("memory.peak") if events else None,
        swap_current=limit("memory.swap.current"),
        swap_max=limit("memory.swap.max"),
    )


def _pids(directory: str) -> dict[str, int | None] | None:
    current = cgroup.read(directory, "pids.current")
    if current is None:
        return None
    return {"current": int(current), "max": amount(cgroup.read(directory, "pids.max"))}


def _hugetlb(directory: str) -> dict[str, dict[str, int | None]]:
    by_size = {}
    for size in huge_page_sizes():
        current = cgroup.read(directory, f"hugetlb.{size}.rsvd.current") or cgroup.read(
            directory, f"hugetlb.{size}.current"
        )
        if current is not None:
            events = cgroup.keyed(cgroup.read(directory, f"hugetlb.{size}.events"))
            by_size[size] = {
                "current": int(current),
                "max": amount(cgroup.read(directory, f"hugetlb.{size}.max")),
                "events_max": events.get("max", 0),
            }
    return by_size


_sizes: list[str] | None = None


def huge_page_sizes() -> list[str]:
    """Return the host's huge page sizes as in the names of cgroup files: `2MB`, `1GB`."""
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
    """Convert 2048 to `2MB`, 1048576 to `1GB`, 64 to `64KB`."""
    for unit in ("KB", "MB"):
        if size_kb < 1024:
            return f"{size_kb}{unit}"
        size_kb //= 1024
    return f"{size_kb}GB"
