"""`update`: sets new limits of a running container. Limits that the request does not name stay. If
the update fails, the old limits are restored.

The stored configuration gets the new values, so that later readers (`state`, a restored container)
see them.
"""

from __future__ import annotations

from pyrunc.container import status
from pyrunc.errors import InvalidArgument, Unsupported, WrongState
from pyrunc.spec.parse import resources_of
from pyrunc.spec.shape import RESOURCES, shaped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pyrunc.container.state import State

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def update(
    state: State, resources: dict[str, Any], missing_controllers: str = "error"
) -> list[str]:
    """Write OCI `linux.resources` (all but `devices`) to the container's cgroup and to the stored
    configuration. Returns warnings. `missing_controllers`: see `Cgroup.apply`.

    Raises InvalidSpec, Unsupported, KernelError, InvalidArgument for a value that the kernel
    refuses, and WrongState if the container is stopped or not created yet, or has no cgroup.
    """
    status.require(state, (status.CREATED, status.RUNNING, status.PAUSED), "container not running")
    group = state.group()
    if group is None:
        raise WrongState(f"container {state.id} has no cgroup")
    # runc, too, leaves the device rules alone: a caller that sends only limits would reset them.
    limits = {
        key: value
        for key, value in resources_of(state.oci_version, resources).items()
        if key != "devices"
    }
    warnings = group.update(limits, missing_controllers)
    _store(state, limits)
    return warnings


def _store(state: State, resources: dict[str, Any]) -> None:
    config = state.config()
    # A null in a configuration is like a missing field.
    linux: dict[str, Any] = config.get("linux") or {}
    stored: dict[str, Any] = linux.get("resources") or {}
    for key, value in resources.items():
        old: Any = stored.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        stored[key] = {**old, **value} if both else value
    config["linux"] = {**linux, "resources": stored}
    state.store_config(config)


def from_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return OCI `linux.resources` with the limits that the flags of `update` set. Raises
    InvalidArgument, Unsupported."""
    for option in ("l3_cache_schema", "mem_bw_schema"):
        if options[option]:
            raise Unsupported(f"{_flag(option)}: Intel RDT is not supported")
    resources: dict[str, Any] = {}
    for option, part, key, convert in _LIMITS:
        if options[option]:
            value = convert(options[option], option)
            resources.setdefault(part, {})[key] = shaped(value, RESOURCES[part][key], _flag(option))
    return resources


def size_bytes(text: str, option: str) -> int:
    """Convert a size to bytes, such as `512m` to 536870912. `-1`, which means no limit, becomes -1.
    `option`: the option's key, for the error's text. Raises InvalidArgument."""
    word = text.strip().lower().removesuffix("ib")
    if word.endswith("b") and word[-2:-1] in UNITS and word[-2:-1]:
        word = word[:-1]
    unit = word[-1:] if word[-1:].isalpha() else ""
    digits = word[: len(word) - len(unit)]
    if unit not in UNITS:
        raise InvalidArgument(f"invalid size {text!r} for {_flag(option)}")
    return _number(digits, option) * (UNITS[unit] if digits != "-1" else 1)


def _number(text: str, option: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(f"invalid value {text!r} for {_flag(option)}")
    return int(text)


def _text(text: str, option: str) -> str:
    return text


def _flag(option: str) -> str:
    """Return the flag of an option's key: `--cpu-quota` for `cpu_quota`."""
    return f"--{option.replace('_', '-')}"


# An option of `update`, its object and field in linux.resources, and how its text is converted.
_LIMITS: tuple[tuple[str, str, str, Callable[[str, str], int | str]], ...] = (
    ("cpu_share", "cpu", "shares", _number),
    ("cpu_period", "cpu", "period", _number),
    ("cpu_quota", "cpu", "quota", _number),
    ("cpu_burst", "cpu", "burst", _number),
    ("cpu_rt_period", "cpu", "realtimePeriod", _number),
    ("cpu_rt_runtime", "cpu", "realtimeRuntime", _number),
    ("cpu_idle", "cpu", "idle", _number),
    ("cpuset_cpus", "cpu", "cpus", _text),
    ("cpuset_mems", "cpu", "mems", _text),
    ("pids_limit", "pids", "limit", _number),
    ("blkio_weight", "blockIO", "weight", _number),
    ("memory", "memory", "limit", size_bytes),
    ("memory_reservation", "memory", "reservation", size_bytes),
    ("memory_swap", "memory", "swap", size_bytes),
)
