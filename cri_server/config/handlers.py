"""Runtime handlers: the OCI runtime and the settings for the containers of a RuntimeClass.

The default handler, `pyrunc` or the empty name, is the server's own runtime. Each table
`[runtimes.NAME]` adds a handler. If the table has the key `binary`, the handler is that external
OCI runtime; otherwise it is the server's own runtime with other settings.
"""

from __future__ import annotations

import re

import msgspec

from cri_server.config.model import Config, ContainersConfig, RuntimeConfig
from pyrunc.errors import InvalidArgument

OURS = ("", "pyrunc")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RuntimeClass.handler is a DNS label
OVERRIDES = tuple(
    name for name in RuntimeConfig.__struct_fields__ if name in ContainersConfig.__struct_fields__
)


def names(config: Config) -> list[str]:
    """Return the names of all handlers, first the two names of the default handler: empty and
    `pyrunc`."""
    return list(dict.fromkeys((*OURS, *config.runtimes)))


def find(config: Config, name: str) -> RuntimeConfig | None:
    """Return the table [runtimes.NAME] of a handler, or None for an unknown handler. If the default
    handler has no table, return an empty one."""
    if name in OURS:
        return config.runtimes.get(name) or RuntimeConfig()
    return config.runtimes.get(name)


def require(config: Config, name: str) -> RuntimeConfig:
    """Return the handler with this name. Raises InvalidArgument if there is none."""
    handler = find(config, name)
    if handler is None:
        available = ", ".join(filter(None, names(config)))
        raise InvalidArgument(f"unknown runtime handler {name[:80]!r}; handlers are {available}")
    return handler


def settings(config: Config, name: str) -> ContainersConfig:
    """Return the settings of the handler's containers: [containers], overridden by the keys of
    [runtimes.NAME]. An unknown handler has no overrides."""
    handler = find(config, name)
    if handler is None:
        return config.containers
    overrides = {key: value for key in OVERRIDES if (value := getattr(handler, key)) is not None}
    return msgspec.structs.replace(config.containers, **overrides)
