"""The common code of all plugins: decodes the request, checks the version, runs the command, and
encodes the answer.

A plugin's executable calls `serve`. The server's workers call `perform`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from cni_plugins.protocol import version
from cni_plugins.protocol.call import CniCall
from cni_plugins.protocol.config import LIMIT_BYTES, PluginConfig
from cni_plugins.protocol.errors import (
    DECODING_FAILURE,
    INCOMPATIBLE_VERSION,
    INTERNAL,
    INVALID_CONFIG,
    IO_FAILURE,
    TAKEN,
    CniError,
)
from cni_plugins.protocol.result import Result
from pyrunc.errors import AlreadyExists, Error, InvalidArgument

Verb = Callable[[CniCall, PluginConfig], None]


@dataclass(frozen=True, slots=True)
class CniPlugin:
    """A plugin: its name, and a function for each CNI command."""

    name: str
    add: Callable[[CniCall, PluginConfig], Result]
    delete: Verb
    check: Verb
    status: Verb
    gc: Verb

    def verb(self, command: str) -> Verb:
        """Return the plugin's function for DEL, CHECK, STATUS or GC."""
        return {
            "DEL": self.delete,
            "CHECK": self.check,
            "STATUS": self.status,
            "GC": self.gc,
        }[command]


def answer(plugin: CniPlugin, environment: Mapping[str, str], content: bytes) -> tuple[int, bytes]:
    """Handle one CNI request: its command is in the variables `environment`, its configuration in
    `content` (stdin). Returns the plugin's exit code and stdout."""
    cni_version = version.LATEST
    try:
        call = CniCall.from_environment(environment)
        if call.command == "VERSION":
            return 0, _encode(version.announcement())
        config = PluginConfig.parse(content)
        # An error has the configuration's version, so that an old runtime can parse it.
        cni_version = (
            config.cni_version if config.cni_version in version.SUPPORTED else version.LATEST
        )
        result = perform(plugin, call, config)
        return 0, b"" if result is None else _encode(result.to_json(cni_version))
    except Exception as error:
        return 1, _encode(to_cni_error(plugin.name, error).to_json(cni_version))


def perform(plugin: CniPlugin, call: CniCall, config: PluginConfig) -> Result | None:
    """Run a command other than VERSION. Return the result of ADD; None for other commands. Raises
    CniError, and any exception of the plugin."""
    version.require_supported(config.cni_version)
    _check_command_version(call.command, config.cni_version)
    if call.command == "ADD":
        return plugin.add(call, config)
    plugin.verb(call.command)(call, config)
    return None


def to_cni_error(name: str, error: Exception) -> CniError:
    """Convert any exception of the plugin `name` to a CniError. Prints the traceback of an
    unexpected exception."""
    if isinstance(error, CniError):
        return CniError(error.code, f"{name}: {error.message}", error.details)
    if isinstance(error, InvalidArgument):
        return CniError(INVALID_CONFIG, f"{name}: {error.message}")
    if isinstance(error, AlreadyExists):
        return CniError(TAKEN, f"{name}: {error.message}")
    if isinstance(error, Error):
        return CniError(IO_FAILURE, f"{name}: {error.message}")
    if isinstance(error, OSError):
        return CniError(IO_FAILURE, f"{name}: {error}")
    # Not at the top: a plugin that runs as an executable pays for each import, for each pod.
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    return CniError(INTERNAL, f"{name}: {type(error).__name__}: {error}")


def serve(plugin: CniPlugin) -> NoReturn:
    """Run the plugin as an executable: read the request from environment and stdin, print the
    answer, and exit."""
    content = b""
    if os.environ.get("CNI_COMMAND") != "VERSION":
        content = _read_all(0)
    code, output = answer(plugin, os.environ, content)
    with open(1, "wb", closefd=False) as file:
        file.write(output)
    sys.exit(code)


def _check_command_version(command: str, cni_version: str) -> None:
    # A runtime must not send a command that the configuration's version does not have.
    first = {"CHECK": "0.4.0", "STATUS": "1.1.0", "GC": "1.1.0"}.get(command)
    if first and not version.at_least(cni_version, first):
        raise CniError(
            INCOMPATIBLE_VERSION, f"{command} needs CNI {first}, the configuration is {cni_version}"
        )


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _read_all(descriptor: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := os.read(descriptor, 65536):
        parts.append(part)
        size += len(part)
        if size > LIMIT_BYTES:
            raise CniError(
                DECODING_FAILURE, f"the configuration on stdin has more than {LIMIT_BYTES} bytes"
            )
    return b"".join(parts)
