"""CRI resources -> OCI resources. Zero means "not set" throughout; the runtime translates to cgroup
v2 files."""

from __future__ import annotations

import re
from typing import Any

from cri_server.api import api_pb2 as api
from pyrunc.cgroups.convert import CORE_LIMITS
from pyrunc.errors import InvalidArgument

OOM_SCORE_RANGE = range(-1000, 1001)
PAGE_SIZE = re.compile(r"[0-9]{1,9}[KMGT]B")  # as the kernel calls the files: hugetlb.2MB.max
CGROUP_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def to_oci(asked: api.LinuxContainerResources) -> dict[str, Any]:
    """The OCI object `linux.resources` without devices. Raises InvalidArgument for values that no
    kernel takes.

    A memory limit without a swap limit means no swap: memory and swap together get the memory
    limit.
    """
    check(asked)
    cpu: dict[str, Any] = {}
    for key, value in (
        ("shares", asked.cpu_shares),
        ("quota", asked.cpu_quota),
        ("period", asked.cpu_period),
    ):
        if value:
            cpu[key] = value
    for key, text in (("cpus", asked.cpuset_cpus), ("mems", asked.cpuset_mems)):
        if text:
            cpu[key] = text
    result: dict[str, Any] = {}
    if cpu:
        result["cpu"] = cpu
    memory = _memory(asked)
    if memory:
        result["memory"] = memory
    if asked.hugepage_limits:
        result["hugepageLimits"] = [
            {"pageSize": h.page_size, "limit": h.limit} for h in asked.hugepage_limits
        ]
    if asked.unified:
        result["unified"] = dict(asked.unified)
    return result


def check(asked: api.LinuxContainerResources) -> None:
    """Refuse what cannot be meant."""
    for name, value, lowest in (
        ("cpu_period", asked.cpu_period, 0),
        ("cpu_quota", asked.cpu_quota, -1),
        ("cpu_shares", asked.cpu_shares, 0),
        ("memory_limit_in_bytes", asked.memory_limit_in_bytes, -1),
        ("memory_swap_limit_in_bytes", asked.memory_swap_limit_in_bytes, -1),
    ):
        if value < lowest:
            raise InvalidArgument(f"linux.resources.{name}: {value} is less than {lowest}")
    if asked.oom_score_adj not in OOM_SCORE_RANGE:
        raise InvalidArgument(
            f"linux.resources.oom_score_adj: {asked.oom_score_adj} is not in -1000..1000"
        )
    limit, total = asked.memory_limit_in_bytes, asked.memory_swap_limit_in_bytes
    if 0 < total < limit:
        raise InvalidArgument(
            f"linux.resources: memory and swap together ({total}) are less than memory ({limit})"
        )
    for huge in asked.hugepage_limits:
        if not PAGE_SIZE.fullmatch(huge.page_size):
            raise InvalidArgument(
                f"linux.resources.hugepage_limits: page size {huge.page_size[:40]!r} is not of the form 2MB"
            )
    for key, text in asked.unified.items():
        if not CGROUP_FILE.fullmatch(key):
            raise InvalidArgument(
                f"linux.resources.unified: {key[:80]!r} is not a cgroup file name"
            )
        if key.startswith("cgroup.") and key not in CORE_LIMITS:
            raise InvalidArgument(
                f"linux.resources.unified: {key} is no limit: the runtime alone writes it"
            )
        if "\0" in text:
            raise InvalidArgument(f"linux.resources.unified: the value of {key} holds a NUL byte")


def clamp_oom_score_adj(value: int, floor: int | None) -> int:
    """`value`, raised to what we may set (`floor`, None: anything)."""
    return value if floor is None else max(value, floor)


def without_hugepages(resources: dict[str, Any], controllers: frozenset[str]) -> dict[str, Any]:
    """Drop zero limits of huge pages on a host without their controller: kubelet lists every size
    it knows."""
    limits = resources.get("hugepageLimits")
    if not limits or "hugetlb" in controllers or any(item["limit"] for item in limits):
        return resources
    return {key: value for key, value in resources.items() if key != "hugepageLimits"}


def merge(
    current: api.LinuxContainerResources, update: api.LinuxContainerResources
) -> api.LinuxContainerResources:
    """`current` with the fields of `update` that are set: what is in force after
    UpdateContainerResources."""
    result = api.LinuxContainerResources()
    result.CopyFrom(current)
    for name in (
        "cpu_period",
        "cpu_quota",
        "cpu_shares",
        "memory_limit_in_bytes",
        "memory_swap_limit_in_bytes",
        "oom_score_adj",
        "cpuset_cpus",
        "cpuset_mems",
    ):
        value = getattr(update, name)
        if value:
            setattr(result, name, value)
    _merge_hugepages(result, update)
    for key, value in update.unified.items():
        result.unified[key] = value
    return result


def _merge_hugepages(
    result: api.LinuxContainerResources, update: api.LinuxContainerResources
) -> None:
    if not update.hugepage_limits:
        return
    limits = {h.page_size: h.limit for h in result.hugepage_limits}
    limits.update({h.page_size: h.limit for h in update.hugepage_limits})
    del result.hugepage_limits[:]
    for size, limit in limits.items():
        result.hugepage_limits.add(page_size=size, limit=limit)


def _memory(asked: api.LinuxContainerResources) -> dict[str, int]:
    memory: dict[str, int] = {}
    if asked.memory_limit_in_bytes:
        memory["limit"] = asked.memory_limit_in_bytes
    if asked.memory_swap_limit_in_bytes:
        memory["swap"] = asked.memory_swap_limit_in_bytes
    elif asked.memory_limit_in_bytes > 0:
        memory["swap"] = asked.memory_limit_in_bytes
    return memory
