"""A plugin's request: the command and its parameters, passed in environment variables.

`CniCall.from_environment` decodes a request in the plugin, and `environment` encodes it in the
runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cni_plugins.protocol.errors import INVALID_ENVIRONMENT, CniError

COMMANDS = ("ADD", "DEL", "CHECK", "STATUS", "GC", "VERSION")
_CONTAINER, _INTERFACE, _NETNS, _PATH = "CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS", "CNI_PATH"
_NEEDS = {
    "ADD": (_CONTAINER, _NETNS, _INTERFACE, _PATH),
    "CHECK": (_CONTAINER, _NETNS, _INTERFACE, _PATH),
    # CNI_NETNS is optional for DEL: the namespace is gone after a reboot.
    "DEL": (_CONTAINER, _INTERFACE, _PATH),
    "GC": (_PATH,),
    "STATUS": (),
    "VERSION": (),
}
# \Z, because $ also matches before a final newline. The names become parts of paths.
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_ARGUMENT_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class CniCall:
    """A request to a plugin.

    - `netns`: empty if the namespace is gone (DEL) or the command does not use it
    - `arguments`: the pairs in CNI_ARGS
    - `path`: the folders in CNI_PATH
    """

    command: str
    container_id: str = ""
    netns: str = ""
    ifname: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> CniCall:
        """Decode the request in a plugin's environment. Raises CniError INVALID_ENVIRONMENT."""
        command = environment.get("CNI_COMMAND", "")
        if command not in COMMANDS:
            raise CniError(
                INVALID_ENVIRONMENT,
                f"CNI_COMMAND is {command[:40]!r}",
                f"expected one of {', '.join(COMMANDS)}",
            )
        missing = [name for name in _NEEDS[command] if not environment.get(name)]
        if missing:
            raise CniError(
                INVALID_ENVIRONMENT, f"{command} needs {', '.join(missing)} in the environment"
            )
        container_id, ifname = environment.get(_CONTAINER, ""), environment.get(_INTERFACE, "")
        if container_id:
            check_identifier(container_id, _CONTAINER)
        if ifname:
            check_interface_name(ifname, _INTERFACE)
        return cls(
            command=command,
            container_id=container_id,
            netns=environment.get(_NETNS, ""),
            ifname=ifname,
            arguments=parse_arguments(environment.get("CNI_ARGS", "")),
            path=tuple(p for p in environment.get(_PATH, "").split(":") if p),
        )

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass this request to a plugin. Raises CniError if
        CNI_ARGS cannot contain one of `arguments`."""
        return {
            "CNI_COMMAND": self.command,
            _CONTAINER: self.container_id,
            _NETNS: self.netns,
            _INTERFACE: self.ifname,
            "CNI_ARGS": format_arguments(self.arguments),
            _PATH: ":".join(self.path),
        }

    def argument(self, key: str) -> str:
        """Return the value of `key` in CNI_ARGS; empty if the key is missing."""
        return next((value for name, value in self.arguments if name == key), "")


def parse_arguments(text: str) -> tuple[tuple[str, str], ...]:
    """Parse CNI_ARGS, `KEY=value;KEY=value`, to pairs in order. Raises CniError for an item without
    `=`."""
    pairs = []
    for part in text.split(";") if text else ():
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise CniError(INVALID_ENVIRONMENT, f"CNI_ARGS: {part[:60]!r} is not KEY=value")
        pairs.append((key, value))
    return tuple(pairs)


def format_arguments(pairs: tuple[tuple[str, str], ...]) -> str:
    """Encode pairs as CNI_ARGS, `KEY=value;KEY=value`. Raises CniError for a value with `;` or `=`,
    which cannot be escaped, and for an invalid or too long key or value."""
    for key, value in pairs:
        if not _ARGUMENT_KEY.match(key):
            raise CniError(INVALID_ENVIRONMENT, f"CNI_ARGS: {key[:60]!r} is not a key")
        # A pod's name with ";" could add arguments of its author's choice, such as IP or MAC.
        if len(value) > 1024 or not value.isprintable() or any(c in value for c in ";="):
            raise CniError(
                INVALID_ENVIRONMENT,
                f"CNI_ARGS: the value of {key} is too long or has invalid characters:"
                f" {value[:60]!r}",
            )
    return ";".join(f"{key}={value}" for key, value in pairs)


def check_identifier(value: str, what: str) -> None:
    """Raise CniError unless `value` is valid as a container id or a network's name (CNI spec,
    "Parameters"). `what` names the value in the error."""
    if len(value) > 255 or not _IDENTIFIER.match(value):
        raise CniError(
            INVALID_ENVIRONMENT, f"{what}: {value[:60]!r} does not match [A-Za-z0-9][A-Za-z0-9_.-]*"
        )


def check_interface_name(value: str, what: str) -> None:
    """Raise CniError unless Linux accepts `value` as an interface's name (dev_valid_name,
    net/core/dev.c). `what` names the value in the error."""
    bad = (
        not 0 < len(value.encode()) < 16
        or value in (".", "..")
        or any(c in "/:" or c.isspace() for c in value)
    )
    if bad or not value.isprintable():
        raise CniError(
            INVALID_ENVIRONMENT, f"{what}: {value[:60]!r} cannot be the name of an interface"
        )
