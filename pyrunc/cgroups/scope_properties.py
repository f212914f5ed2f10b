"""Converts OCI resources to properties of a systemd unit, without I/O.

Limits are written to the cgroup's files and also sent to systemd. Otherwise systemd would undo the
limits when it reloads its units, because it then writes the files again. A property's value is a
pair (D-Bus signature, value). Source: systemd.resource-control(5), org.freedesktop.systemd1(5).
"""

from __future__ import annotations

from pyrunc.cgroups import convert
from pyrunc.errors import InvalidSpec
from pyrunc.spec.check import cpu_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    Property = tuple[str, tuple[str, Any]]

INFINITY = (1 << 64) - 1
SECOND_US = 1_000_000
PERCENT_US = SECOND_US // 100
ANNOTATION = "org.systemd.property."
SIGNED = {"int16": "n", "int32": "i", "int64": "x"}
UNSIGNED = {"byte": "y", "uint16": "q", "uint32": "u", "uint64": "t"}


def properties(resources: Mapping[str, Any]) -> list[Property]:
    """Return the systemd properties for those resources that systemd manages. A limit in `unified`
    replaces the same limit in another field. Raises InvalidSpec."""
    by_name = dict([*_cpu(resources.get("cpu") or {}), *_memory(resources.get("memory") or {})])
    limit = (resources.get("pids") or {}).get("limit")
    if limit is not None:
        # With 0, systemd and the kernel would not even allow the container's own process
        # (`convert._pids`).
        by_name["TasksMax"] = ("t", INFINITY if limit == -1 else max(int(limit), 1))
    by_name |= dict(_unified(resources.get("unified") or {}))
    return list(by_name.items())


def _cpu(cpu: Mapping[str, Any]) -> Iterator[Property]:
    if cpu.get("idle"):
        # systemd 252 takes 0 for `idle`, which sets cpu.idle.
        yield "CPUWeight", ("t", 0)
    elif cpu.get("shares"):
        yield "CPUWeight", ("t", convert.weight(int(cpu["shares"])))
    quota, period = int(cpu.get("quota") or 0), int(cpu.get("period") or 0)
    if period:
        yield "CPUQuotaPeriodUSec", ("t", period)
    if quota:
        yield (
            "CPUQuotaPerSecUSec",
            ("t", quota_per_second(quota, period or convert.DEFAULT_PERIOD_US)),
        )
    for file, name in _CPUSETS.items():
        if text := cpu.get(file.removeprefix("cpuset.")):
            yield name, ("ay", bitmap(text))


_CPUSETS = {"cpuset.cpus": "AllowedCPUs", "cpuset.mems": "AllowedMemoryNodes"}


def quota_per_second(quota: int, period: int) -> int:
    """Convert a CPU quota per period, both in microseconds, to microseconds of CPU time per second
    (CPUQuotaPerSecUSec). A negative quota is INFINITY.

    The result is rounded up to whole percents of a CPU: systemd has no finer values, and no
    container may get less than its quota.
    """
    if quota < 0:
        return INFINITY
    # Both divisions round up.
    exact = -(-quota * SECOND_US // period)
    return -(-exact // PERCENT_US) * PERCENT_US


def bitmap(cpus: str) -> bytes:
    """Convert a list of CPUs or memory nodes such as `0-2,8` to a little-endian bit mask, here
    b"\\x07\\x01". Raises InvalidSpec."""
    path = f"{convert.RESOURCES}.cpu"
    bits = sum(1 << number for number in cpu_list(cpus, path))
    if not bits:
        raise InvalidSpec(path, f"{cpus!r} is not a list such as 0-3,7")
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def _memory(memory: Mapping[str, Any]) -> Iterator[Property]:
    swap = convert.swap_max(memory)
    if swap is not None:
        yield "MemorySwapMax", ("t", _bytes(swap))
    if memory.get("limit"):
        yield "MemoryMax", ("t", _bytes(int(memory["limit"])))
    if memory.get("reservation"):
        yield "MemoryLow", ("t", _bytes(int(memory["reservation"])))


def _bytes(value: int) -> int:
    return INFINITY if value == -1 else value


_UNIFIED = {
    "cpu.weight": "CPUWeight",
    "memory.max": "MemoryMax",
    "memory.high": "MemoryHigh",
    "memory.low": "MemoryLow",
    "memory.min": "MemoryMin",
    "memory.swap.max": "MemorySwapMax",
    "pids.max": "TasksMax",
}


def _unified(unified: Mapping[str, Any]) -> Iterator[Property]:
    for file, content in unified.items():
        text = str(content).strip()
        if file in _UNIFIED:
            yield _UNIFIED[file], ("t", INFINITY if text == "max" else _number(file, text))
        elif file == "cpu.idle" and text == "1":
            yield "CPUWeight", ("t", 0)
        elif file == "cpu.max":
            quota, _, period = text.partition(" ")
            period_us = _number(file, period) if period else convert.DEFAULT_PERIOD_US
            yield "CPUQuotaPeriodUSec", ("t", period_us)
            amount = -1 if quota == "max" else _number(file, quota)
            yield "CPUQuotaPerSecUSec", ("t", quota_per_second(amount, period_us))
        elif file in _CPUSETS:
            yield _CPUSETS[file], ("ay", bitmap(text))
        elif file == "memory.oom.group":
            yield "OOMPolicy", ("s", "kill" if text == "1" else "continue")


def _number(file: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidSpec(f"{convert.RESOURCES}.unified", f"{text!r} for {file} is not a number")
    return int(text)


def from_annotations(annotations: Mapping[str, str]) -> list[Property]:
    """Parse annotations `org.systemd.property.NAME: value`. The value is GVariant text: a string,
    boolean, number or array of strings. Raises InvalidSpec.

    If NAME ends in Sec, but not in USec, the value is in seconds. systemd then gets microseconds,
    as the property whose name ends in USec instead.
    """
    properties = []
    for key, text in annotations.items():
        if not key.startswith(ANNOTATION):
            continue
        name = key[len(ANNOTATION) :]
        if len(name) < 3 or not (name.isascii() and name.isalpha()):
            raise InvalidSpec(f"annotations[{key!r}]", "is not the name of a systemd property")
        value = _gvariant(text.strip(), key)
        if name.endswith("Sec") and not name.endswith("USec"):
            # As in runc: unit files have seconds (TimeoutStopSec), the D-Bus properties
            # microseconds (TimeoutStopUSec).
            name, value = f"{name[:-3]}USec", ("t", _microseconds(value[1], key))
        properties.append((name, value))
    return properties


def _microseconds(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidSpec(f"annotations[{key!r}]", f"{value!r} is not a time in seconds")
    return int(value * SECOND_US)


def _gvariant(text: str, key: str) -> tuple[str, Any]:
    kind, _, rest = text.partition(" ")
    if text in ("true", "false"):
        return "b", text == "true"
    if text[:1] in ("'", '"') and len(text) > 1 and text[-1] == text[0]:
        return "s", text[1:-1].replace("\\" + text[0], text[0])
    if text.startswith("[") and text.endswith("]"):
        items = [_gvariant(item.strip(), key) for item in text[1:-1].split(",") if item.strip()]
        if all(signature == "s" for signature, _ in items):
            return "as", [value for _, value in items]
    if kind in SIGNED | UNSIGNED and _is_number(rest.strip()):
        return (SIGNED | UNSIGNED)[kind], int(rest)
    if _is_number(text):
        return "i", int(text)
    if _is_number(text.replace(".", "", 1)):
        return "d", float(text)
    raise InvalidSpec(f"annotations[{key!r}]", f"{text!r} is not a value that systemd takes")


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit()
