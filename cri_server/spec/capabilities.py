"""Which capabilities a container's process has: the default set, then what the caller drops and
adds."""

from __future__ import annotations

from collections.abc import Iterable

from cri_server.api import api_pb2 as api
from pyrunc.abi.capability import CAPABILITIES, DEFAULT_CAPABILITIES
from pyrunc.errors import InvalidArgument

ALL = "ALL"


def of(
    context: api.LinuxContainerSecurityContext,
    available: int,
    default: Iterable[str] = DEFAULT_CAPABILITIES,
) -> dict[str, list[str]]:
    """The OCI object `process.capabilities`. `default`: what a container has that asks for nothing.
    `available` is the server's own effective set as a mask: nothing beyond it can be granted to a
    privileged container. Raises InvalidArgument for unknown names."""
    if context.privileged:
        granted = {name for name, number in CAPABILITIES.items() if available >> number & 1}
        return _sets(granted, set())
    asked = context.capabilities
    granted = _apply(
        _names(default), _names(asked.drop_capabilities), _names(asked.add_capabilities)
    )
    ambient = _names(asked.add_ambient_capabilities)
    ambient = set(CAPABILITIES) if ALL in ambient else ambient
    granted |= ambient
    return _sets(granted, ambient)


def _apply(start: set[str], drop: set[str], add: set[str]) -> set[str]:
    """`ALL` first, single names after it, so that drop ALL + add X leaves X alone."""
    granted = set(start)
    if ALL in add:
        granted = set(CAPABILITIES)
    if ALL in drop:
        granted = set()
    return (granted | add - {ALL}) - (drop - {ALL})


def _names(asked: Iterable[str]) -> set[str]:
    """Full names; `ALL` stays a word of its own."""
    words = {name.upper().removeprefix("CAP_") for name in asked}
    names = {word if word == ALL else f"CAP_{word}" for word in words}
    unknown = names - set(CAPABILITIES) - {ALL}
    if unknown:
        raise InvalidArgument(f"unknown capability {min(unknown)!r}")
    return names


def _sets(granted: set[str], ambient: set[str]) -> dict[str, list[str]]:
    listed = [name for name in CAPABILITIES if name in granted]
    raised = [name for name in CAPABILITIES if name in ambient]
    return {
        "bounding": listed,
        "effective": listed,
        "permitted": listed,
        "inheritable": raised,
        "ambient": raised,
    }
