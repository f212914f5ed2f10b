"""Runtime handlers: the name of a RuntimeClass -> what runs its containers, and with which
settings.

The default has no name and is our own runtime, which is also called `pyrunc`; `[runtimes.NAME]`
adds others. A handler without a binary is our own runtime with other settings.
"""

from __future__ import annotations

import re

import msgspec

from cri_server.config.model import Config, Containers, Runtime
from pyrunc.errors import InvalidArgument

OURS = ("", "pyrunc")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RuntimeClass.handler is a DNS label
OVERRIDES = tuple(
    name for name in Runtime.__struct_fields__ if name in Containers.__struct_fields__
)


def names(config: Config) -> list[str]:
    """All handlers, the default one first."""
    return list(dict.fromkeys((*OURS, *config.runtimes)))


def find(config: Config, name: str) -> Runtime | None:
    """The handler of this name; None when there is none."""
    if name in OURS:
        return config.runtimes.get(name) or Runtime()
    return config.runtimes.get(name)


def require(config: Config, name: str) -> Runtime:
    """The handler of this name. Raises InvalidArgument when there is none."""
    found = find(config, name)
    if found is None:
        known = ", ".join(filter(None, names(config)))
        raise InvalidArgument(f"unknown runtime handler {name[:80]!r}; there are {known}")
    return found


def settings(config: Config, name: str) -> Containers:
    """What holds for containers of the handler."""
    found = find(config, name)
    if found is None:
        return config.containers
    own = {key: value for key in OVERRIDES if (value := getattr(found, key)) is not None}
    return msgspec.structs.replace(config.containers, **own) if own else config.containers
