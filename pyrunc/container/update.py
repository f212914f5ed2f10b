"""`update`: new limits for a running container. Limits that are not named stay, and a failure
restores the old ones.

The stored configuration gets the new values, so that later readers (`state`, a restored container)
see them.
"""

from __future__ import annotations

from pyrunc import atomic_file, jsontext
from pyrunc.container import state as states
from pyrunc.container import status
from pyrunc.errors import InvalidArgument, Unsupported, WrongState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from pyrunc.container.state import State

UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def update(
    state: State, resources: dict[str, Any], missing_controllers: str = "error"
) -> list[str]:
    """Write OCI `linux.resources`; device rules are not touched. Returns warnings.

    Raises WrongState (not running), InvalidSpec, Unsupported, KernelError.
    """
    status.require(state, (status.CREATED, status.RUNNING, status.PAUSED), "container not running")
    group = state.group()
    if group is None:
        raise WrongState(f"container {state.id} has no cgroup")
    # runc, too, leaves the device rules alone: a caller that sends only limits would reset them.
    limits = {key: value for key, value in resources.items() if key != "devices"}
    warnings = group.update(limits, missing_controllers)
    _store(state, limits)
    return warnings


def _store(state: State, resources: dict[str, Any]) -> None:
    config = state.config()
    stored = config.setdefault("linux", {}).setdefault("resources", {})
    for key, value in resources.items():
        old = stored.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        stored[key] = {**old, **value} if both else value
    text = jsontext.dumps(config)
    atomic_file.write_bytes(f"{state.folder}/{states.CONFIG}", text.encode("ascii"))


# runtime-spec's types: uint64 and uint16. The others take -1 for "no limit".
UNSIGNED = ("shares", "period", "burst", "realtimePeriod", "weight")


def from_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the resources that the flags of `update` name. Raises InvalidArgument, Unsupported."""
    numbers = {
        "cpu": {
            "shares": "cpu_share",
            "period": "cpu_period",
            "quota": "cpu_quota",
            "burst": "cpu_burst",
            "realtimePeriod": "cpu_rt_period",
            "realtimeRuntime": "cpu_rt_runtime",
            "idle": "cpu_idle",
        },
        "pids": {"limit": "pids_limit"},
        "blockIO": {"weight": "blkio_weight"},
    }
    for option in ("l3_cache_schema", "mem_bw_schema"):
        if options[option]:
            raise Unsupported(f"{_flag(option)}: Intel RDT is not supported")
    sizes = {"limit": "memory", "reservation": "memory_reservation", "swap": "memory_swap"}
    resources: dict[str, Any] = {}
    for part, keys in numbers.items():
        for key, option in keys.items():
            if options[option]:
                number = _number(options[option], option)
                if number < 0 and key in UNSIGNED:
                    raise InvalidArgument(
                        f"invalid value {number} for {_flag(option)}: it must not be negative"
                    )
                resources.setdefault(part, {})[key] = number
    for key, option in (("cpus", "cpuset_cpus"), ("mems", "cpuset_mems")):
        if options[option]:
            resources.setdefault("cpu", {})[key] = options[option]
    for key, option in sizes.items():
        if options[option]:
            resources.setdefault("memory", {})[key] = size_bytes(options[option], option)
    return resources


def size_bytes(text: str, option: str) -> int:
    """Convert `512m` to 536870912; `-1` stays. Raises InvalidArgument."""
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


def _flag(option: str) -> str:
    """Return the option as on the command line."""
    return f"--{option.replace('_', '-')}"
