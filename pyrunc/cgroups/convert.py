"""Converts OCI `linux.resources` to the contents of cgroup v2 files, without I/O. `settings`
returns the writes in the order in which the caller must make them.

A `CgroupSetting` is one write(2). The caller also passes a function that reads a file of the group,
because some contents depend on the file's present content: a quota without a period keeps the
period. Swap is written before the memory limit, cpu.idle before the weight, the burst before the
quota, and `unified` last, verbatim. Sources: runtime-spec config-linux.md, and runc's formula of
2025, which converts 1024 shares to the default weight 100.
"""

from __future__ import annotations

import math

from pyrunc.errors import InvalidSpec, Unsupported
from pyrunc.spec.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    Reader = Callable[[str], str | None]

# cpu.max of a new group is "max 100000" (cgroup-v2.rst).
DEFAULT_PERIOD_US = 100_000
DEFAULT_WEIGHT = 100  # a group's default, so a missing file changes nothing
RESOURCES = "linux.resources"
# Of the files of cgroup.* only those that limit or measure: cgroup.procs moves processes,
# cgroup.kill kills them, cgroup.freeze stops them.
CORE = "cgroup"
CORE_LIMITS = ("cgroup.max.depth", "cgroup.max.descendants", "cgroup.pressure")
V1_ONLY_MEMORY = ("kernel", "kernelTCP", "swappiness", "disableOOMKiller", "useHierarchy")


class CgroupSetting(Value):
    """The `content` to write to the cgroup's file `file`. `dispensable`: a missing file is no
    error, for example because the content means "no limit"."""

    file: str
    content: str
    dispensable: bool = False

    @property
    def controller(self) -> str:
        """Return the controller of the file: `memory` for `memory.max`."""
        return self.file.partition(".")[0]


def settings(resources: Mapping[str, Any], read: Reader) -> list[CgroupSetting]:
    """Return all writes for the OCI `resources`, in order. `read(file)` returns the present content
    of a file of the group, None if it is missing. Raises InvalidSpec for contradictions,
    Unsupported for limits that only cgroup v1 has."""
    _refuse_v1_only(resources)
    return [
        *_cpu(_part(resources, "cpu"), read),
        *_memory(_part(resources, "memory"), read),
        *_pids(_part(resources, "pids")),
        *_block_io(_part(resources, "blockIO"), read),
        *_huge_pages(resources.get("hugepageLimits") or []),
        *_rdma(_part(resources, "rdma")),
        *_unified(_part(resources, "unified")),
    ]


def warnings(resources: Mapping[str, Any]) -> list[str]:
    """Return a warning for each memory setting in `resources` that has no effect on cgroup v2."""
    memory = _part(resources, "memory")
    return [
        f"memory.{name} has no effect on cgroup v2"
        for name in V1_ONLY_MEMORY
        if memory.get(name) not in (None, False)
    ]


def weight(shares: int) -> int:
    """Convert cpu.shares (2..262144) to cpu.weight (1..10000). The logarithm of the weight is a
    quadratic function of log2(shares) through 2 -> 1, 1024 -> 100, 262144 -> 10000."""
    if shares <= 2:
        return 1
    if shares >= 262144:
        return 10000
    log = math.log2(shares)
    exponent = (log * log + 125 * log) / 612.0 - 7.0 / 34.0
    return math.ceil(round(10**exponent, 9))  # for 1024: 100.00000000000001 is 100, not 101


def io_weight(blkio_weight: int) -> int:
    """Convert blkio.weight (10..1000) to io.weight (1..10000), linearly."""
    return 1 + (blkio_weight - 10) * 9999 // 990


def swap_max(memory: Mapping[str, Any]) -> int | None:
    """Return the value of memory.swap.max in bytes from OCI's `limit` and `swap`, where `swap` is
    the sum of memory and swap. -1 means unlimited, None leaves the file unchanged.

    Raises InvalidSpec if `swap` is below `limit` or comes without a `limit`. A `swap` of -1 is
    always valid.
    """
    limit, swap = int(memory.get("limit") or 0), int(memory.get("swap") or 0)
    # As in runc, for callers that know v1: memory without a limit lifts the limit of swap as well.
    if limit == -1 and swap == 0:
        return -1
    if swap in (-1, 0):
        return swap or None
    if limit == -1:
        return swap
    if limit == 0:
        raise InvalidSpec(
            f"{RESOURCES}.memory.swap", "unable to set swap limit without memory limit"
        )
    if swap < limit:
        raise InvalidSpec(f"{RESOURCES}.memory.swap", "memory+swap limit should be >= memory limit")
    return swap - limit


def _part(resources: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part: Mapping[str, Any] = resources.get(name) or {}
    return part


def _required(part: Mapping[str, Any], field: str, path: str) -> int:
    if part.get(field) is None:
        raise InvalidSpec(f"{RESOURCES}.{path}.{field}", "is required")
    return int(part[field])


def _device(part: Mapping[str, Any], path: str) -> str:
    return f"{_required(part, 'major', path)}:{_required(part, 'minor', path)}"


def _amount(value: int) -> str:
    return "max" if value == -1 else str(value)


def _refuse_v1_only(resources: Mapping[str, Any]) -> None:
    network, cpu = _part(resources, "network"), _part(resources, "cpu")
    if network.get("classID") or network.get("priorities"):
        raise Unsupported("network.classID and network.priorities need cgroup v1")
    if cpu.get("realtimeRuntime") or cpu.get("realtimePeriod"):
        raise Unsupported("cpu.realtimeRuntime and cpu.realtimePeriod need cgroup v1")


def _cpu(cpu: Mapping[str, Any], read: Reader) -> Iterator[CgroupSetting]:
    shares = int(cpu.get("shares") or 0)
    if cpu.get("idle") is not None:
        # The kernel refuses a weight for a group that is idle (EINVAL), so 0 is written before the
        # weight.
        yield CgroupSetting("cpu.idle", str(int(cpu["idle"])), dispensable=not cpu["idle"])
    if shares:
        # containerd sends 1024 shares with every container, which must not fail where v2 has no cpu
        # controller (a hybrid host).
        yield CgroupSetting(
            "cpu.weight", str(weight(shares)), dispensable=weight(shares) == DEFAULT_WEIGHT
        )
    if cpu.get("burst") is not None:
        # The kernel refuses a quota below the present burst, so a lower burst goes first (`limits`
        # writes a refused one again).
        yield CgroupSetting("cpu.max.burst", str(int(cpu["burst"])), dispensable=not cpu["burst"])
    if (maximum := _cpu_max(cpu, read)) is not None:
        yield CgroupSetting("cpu.max", maximum, dispensable=maximum.startswith("max"))
    for key, file in (("cpus", "cpuset.cpus"), ("mems", "cpuset.mems")):
        if cpu.get(key):
            yield CgroupSetting(file, str(cpu[key]))


def _cpu_max(cpu: Mapping[str, Any], read: Reader) -> str | None:
    quota, period = int(cpu.get("quota") or 0), int(cpu.get("period") or 0)
    if not quota and not period:
        return None
    # Quota and period are written together, so the one that `cpu` lacks is read from the file.
    old = (read("cpu.max") or f"max {DEFAULT_PERIOD_US}").split()
    amount = old[0] if not quota else "max" if quota < 0 else str(quota)
    return f"{amount} {period or old[1]}"


def _memory(memory: Mapping[str, Any], read: Reader) -> Iterator[CgroupSetting]:
    limit, reservation = int(memory.get("limit") or 0), int(memory.get("reservation") or 0)
    swap = swap_max(memory)
    # The kernel would kill processes until the usage is below a new memory.max (cgroup-v2.rst).
    if limit > 0 and memory.get("checkBeforeUpdate"):
        usage = int(read("memory.current") or 0)
        if usage > limit:
            raise InvalidSpec(
                f"{RESOURCES}.memory.limit",
                f"rejecting memory limit {limit} below the usage of {usage}",
            )
    if swap is not None:
        yield CgroupSetting("memory.swap.max", _amount(swap), dispensable=swap in (0, -1))
    if limit:
        yield CgroupSetting("memory.max", _amount(limit), dispensable=limit == -1)
    if reservation:
        yield CgroupSetting("memory.low", _amount(reservation), dispensable=reservation == -1)


def _pids(pids: Mapping[str, Any]) -> Iterator[CgroupSetting]:
    limit = pids.get("limit")
    # 0 becomes 1, as in systemd: since runtime-spec 1.3 the limit is a pointer, and 0 no longer
    # means "unset".
    if limit is not None:
        yield CgroupSetting(
            "pids.max", _amount(int(limit)) if limit else "1", dispensable=limit == -1
        )


def _block_io(io: Mapping[str, Any], read: Reader) -> Iterator[CgroupSetting]:
    # BFQ has its own file, whose scale ends at 1000 as in v1; io.weight belongs to the iocost
    # controller.
    bfq = read("io.bfq.weight") is not None
    file = "io.bfq.weight" if bfq else "io.weight"
    lowest = 1 if bfq else 10  # of blkio.weight, which io_weight converts
    weights = [("weight", "", io)]
    for index, entry in enumerate(io.get("weightDevice") or []):
        path = f"weightDevice[{index}]"
        weights.append((f"{path}.weight", f"{_device(entry, f'blockIO.{path}')} ", entry))
    for field, device, entry in weights:
        if entry.get("weight"):
            value = int(entry["weight"])
            if not lowest <= value <= 1000:
                raise InvalidSpec(
                    f"{RESOURCES}.blockIO.{field}", f"{value} is not between {lowest} and 1000"
                )
            yield CgroupSetting(file, f"{device}{value if bfq else io_weight(value)}")
    for key, word in (
        ("throttleReadBpsDevice", "rbps"),
        ("throttleWriteBpsDevice", "wbps"),
        ("throttleReadIOPSDevice", "riops"),
        ("throttleWriteIOPSDevice", "wiops"),
    ):
        for index, entry in enumerate(io.get(key) or []):
            path = f"blockIO.{key}[{index}]"
            rate = _required(entry, "rate", path)
            yield CgroupSetting("io.max", f"{_device(entry, path)} {word}={rate or 'max'}")


def _huge_pages(limits: list[Mapping[str, Any]]) -> Iterator[CgroupSetting]:
    for index, limit in enumerate(limits):
        size = str(limit.get("pageSize", ""))
        if not size or not size.isalnum():
            raise InvalidSpec(
                f"{RESOURCES}.hugepageLimits[{index}].pageSize", f"not a page size: {size!r}"
            )
        amount = _required(limit, "limit", f"hugepageLimits[{index}]")
        # kubelet sends a limit of 0 for each page size with every container: without the controller
        # there is nothing to limit.
        yield CgroupSetting(f"hugetlb.{size}.max", str(amount), dispensable=not amount)
        # Without a limit of reservations a process that has reserved too many pages dies by SIGBUS
        # when it touches them (hugetlb.rst of cgroup-v1). Linux 5.7 has the file.
        yield CgroupSetting(f"hugetlb.{size}.rsvd.max", str(amount), dispensable=True)


def _rdma(rdma: Mapping[str, Any]) -> Iterator[CgroupSetting]:
    for device, limit in rdma.items():
        handles, objects = limit.get("hcaHandles"), limit.get("hcaObjects")
        words = [device]
        words += [f"hca_handle={handles}"] if handles is not None else []
        words += [f"hca_object={objects}"] if objects is not None else []
        yield CgroupSetting("rdma.max", " ".join(words))


def _unified(unified: Mapping[str, Any]) -> Iterator[CgroupSetting]:
    for file, content in unified.items():
        controller, dot, parameter = file.partition(".")
        if "/" in file or "\0" in file or not controller or not dot or not parameter:
            raise InvalidSpec(
                f"{RESOURCES}.unified", f"{file!r} is not of the form controller.parameter"
            )
        if controller == CORE and file not in CORE_LIMITS:
            raise InvalidSpec(
                f"{RESOURCES}.unified", f"{file!r} is no limit: only the runtime writes it"
            )
        # One write(2) for each line: files such as io.max take one device at a time.
        for line in str(content).split("\n"):
            if line or content == "":
                yield CgroupSetting(file, line)
