"""Converts CRI resources to OCI resources. A value of zero means "not set" in both. pyrunc converts
the OCI resources to values of cgroup v2."""

from __future__ import annotations

import re
from typing import Any

from cri_server.api import api_pb2 as api
from cri_server.store.model import copy
from pyrunc.cgroups.convert import CORE_LIMITS
from pyrunc.errors import InvalidArgument

# The keys of OCI's tables that CRI sets.
CPU = {
    "shares": "cpu_shares",
    "quota": "cpu_quota",
    "period": "cpu_period",
    "cpus": "cpuset_cpus",
    "mems": "cpuset_mems",
}
MEMORY = ("limit", "swap")
OOM_SCORE_RANGE = range(-1000, 1001)
PAGE_SIZE = re.compile(r"[0-9]{1,9}[KMGT]B")  # as the kernel calls the files: hugetlb.2MB.max
CGROUP_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


def to_oci(request: api.LinuxContainerResources) -> dict[str, Any]:
    """Convert CRI resources to the OCI object `linux.resources`, without devices. Raises
    InvalidArgument for values that no kernel accepts.

    Without a swap limit, the memory limit also limits memory and swap together, so the container
    gets no swap.
    """
    check(request)
    cpu = {key: getattr(request, name) for key, name in CPU.items()}
    result = {
        "cpu": {key: value for key, value in cpu.items() if value},
        "memory": _memory(request),
        "hugepageLimits": [
            {"pageSize": h.page_size, "limit": h.limit} for h in request.hugepage_limits
        ],
        "unified": dict(request.unified),
    }
    return {key: value for key, value in result.items() if value}


def replace(current: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the OCI object `current` with the new `limits` (from `to_oci`). They replace
    all limits that CRI can set. Devices, and limits from NRI plugins and annotations, stay."""
    result = {**current, "hugepageLimits": [], "unified": {}, **limits}
    for table, keys in (("cpu", CPU), ("memory", MEMORY)):
        others = {key: v for key, v in current.get(table, {}).items() if key not in keys}
        result[table] = {**others, **limits.get(table, {})}
    return {key: value for key, value in result.items() if value}


def check(request: api.LinuxContainerResources) -> None:
    """Raise InvalidArgument for a value outside its range or format."""
    for name, value, lowest in (
        ("cpu_period", request.cpu_period, 0),
        ("cpu_quota", request.cpu_quota, -1),
        ("cpu_shares", request.cpu_shares, 0),
        ("memory_limit_in_bytes", request.memory_limit_in_bytes, -1),
        ("memory_swap_limit_in_bytes", request.memory_swap_limit_in_bytes, -1),
    ):
        if value < lowest:
            raise InvalidArgument(f"linux.resources.{name}: {value} is less than {lowest}")
    if request.oom_score_adj not in OOM_SCORE_RANGE:
        raise InvalidArgument(
            f"linux.resources.oom_score_adj: {request.oom_score_adj} is not in -1000..1000"
        )
    limit, total = request.memory_limit_in_bytes, request.memory_swap_limit_in_bytes
    if 0 < total < limit:
        raise InvalidArgument(
            f"linux.resources: memory and swap together ({total}) are less than memory ({limit})"
        )
    for huge in request.hugepage_limits:
        if not PAGE_SIZE.fullmatch(huge.page_size):
            raise InvalidArgument(
                f"linux.resources.hugepage_limits: page size {huge.page_size[:40]!r} is not of"
                " the form 2MB"
            )
    for key, text in request.unified.items():
        # A slash would lead out of the cgroup (`../cgroup.procs`).
        if not CGROUP_FILE.fullmatch(key):
            raise InvalidArgument(
                f"linux.resources.unified: {key[:80]!r} is not a cgroup file name"
            )
        # cgroup.procs would move processes of the node into the container; cgroup.freeze would
        # stop the container unseen.
        if key.startswith("cgroup.") and key not in CORE_LIMITS:
            raise InvalidArgument(
                f"linux.resources.unified: {key} is not a limit; only the runtime writes it"
            )
        if "\0" in text:
            raise InvalidArgument(f"linux.resources.unified: the value of {key} holds a NUL byte")


def clamp_oom_score_adj(value: int, floor: int | None) -> int:
    """Return `value`, but at least `floor`, the lowest oom_score_adj that the server may set. None
    means no floor."""
    return value if floor is None else max(value, floor)


def without_hugepages(resources: dict[str, Any], controllers: frozenset[str]) -> dict[str, Any]:
    """Return `resources` without the huge page limits if all of them are zero and the host does not
    have the hugetlb controller; else return `resources` unchanged. (kubelet sends a limit of zero
    for every page size.)"""
    limits = resources.get("hugepageLimits")
    if not limits or "hugetlb" in controllers or any(item["limit"] for item in limits):
        return resources
    return {key: value for key, value in resources.items() if key != "hugepageLimits"}


def merge(
    current: api.LinuxContainerResources, update: api.LinuxContainerResources
) -> api.LinuxContainerResources:
    """Return the resources after UpdateContainerResources: `current`, overridden by the fields that
    are set in `update`."""
    result = copy(current)
    result.MergeFrom(update)  # skips zeros, and appends to repeated fields
    limits = {h.page_size: h.limit for h in result.hugepage_limits}
    del result.hugepage_limits[:]
    for size, limit in limits.items():
        result.hugepage_limits.add(page_size=size, limit=limit)
    return result


def _memory(request: api.LinuxContainerResources) -> dict[str, int]:
    memory: dict[str, int] = {}
    if request.memory_limit_in_bytes:
        memory["limit"] = request.memory_limit_in_bytes
    if request.memory_swap_limit_in_bytes:
        memory["swap"] = request.memory_swap_limit_in_bytes
    elif request.memory_limit_in_bytes > 0:
        memory["swap"] = request.memory_limit_in_bytes
    return memory
