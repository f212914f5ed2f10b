"""Computes a container's capabilities: the default set, plus the added and ambient capabilities,
minus the dropped ones. A privileged container gets all that the server has."""

from __future__ import annotations

from collections.abc import Iterable

from cri_server.api import api_pb2 as api
from pyrunc.abi.capability import CAPABILITIES, DEFAULT_CAPABILITIES
from pyrunc.errors import InvalidArgument

ALL = "ALL"


def to_oci(
    context: api.LinuxContainerSecurityContext,
    available: int,
    default: Iterable[str] = DEFAULT_CAPABILITIES,
) -> dict[str, list[str]]:
    """Return the OCI object `process.capabilities`.

    `default`: the capabilities of a container that requests none. `available`: a bit mask of the
    server's effective capabilities; a privileged container gets all of them. Raises InvalidArgument
    for an unknown name.
    """
    if context.privileged:
        granted = {name for name, number in CAPABILITIES.items() if available >> number & 1}
        return _sets(granted, set())
    request = context.capabilities
    granted = _apply(
        _names(default), _names(request.drop_capabilities), _names(request.add_capabilities)
    )
    ambient = _names(request.add_ambient_capabilities)
    ambient = set(CAPABILITIES) if ALL in ambient else ambient
    granted |= ambient
    return _sets(granted, ambient)


def _apply(start: set[str], drop: set[str], add: set[str]) -> set[str]:
    """Return `start` with `add` and without `drop`. A name in both is dropped. `ALL` in either is
    applied before single names, so that "drop ALL, add X" leaves X."""
    granted = set(start)
    if ALL in add:
        granted = set(CAPABILITIES)
    if ALL in drop:
        granted = set()
    return (granted | add - {ALL}) - (drop - {ALL})


def _names(requested: Iterable[str]) -> set[str]:
    """Convert names such as `NET_ADMIN` or `cap_net_admin` to `CAP_NET_ADMIN`. `ALL` stays `ALL`.
    Raises InvalidArgument for an unknown capability."""
    words = {name.upper().removeprefix("CAP_") for name in requested}
    names = {word if word == ALL else f"CAP_{word}" for word in words}
    unknown = names - set(CAPABILITIES) - {ALL}
    if unknown:
        raise InvalidArgument(f"unknown capability {min(unknown)!r}")
    return names


def _sets(granted: set[str], ambient: set[str]) -> dict[str, list[str]]:
    bounding = [name for name in CAPABILITIES if name in granted]
    ambient_list = [name for name in CAPABILITIES if name in ambient]
    # An inheritable capability becomes permitted at execve(2) of a file that has it as inheritable,
    # also for users who are not root (CVE-2022-24769). Ambient capabilities must be inheritable
    # (capabilities(7)).
    return {
        "bounding": bounding,
        "effective": bounding,
        "permitted": bounding,
        "inheritable": ambient_list,
        "ambient": ambient_list,
    }
